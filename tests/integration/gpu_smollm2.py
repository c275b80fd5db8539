"""The real default model on a GPU against the CPU, teacher-forced on this repository's own text. By hand:

    python tests/integration/gpu_smollm2.py [MODEL] [STEPS]

MODEL is a folder or a .gguf file. Prints how often the largest logit is the same token:

    float32, pariskv on the GPU against pariskv on the CPU     wanted: at least 0.999
    bfloat16 against dense float32, on the GPU                 wanted: within 0.01 of what dense bfloat16 has
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from pariskv import Session
from pariskv.config import GenerationConfig
from pariskv.decode import Batch, make_steps, prefill
from pariskv.integrations.models import DEFAULT_MODEL
from pariskv.sampling import Sampler

ROOT = Path(__file__).parents[2]
PROMPT_TOKENS = 3000


def main(model: str, steps: int, devices: tuple[str, str]) -> None:
    cpu, gpu = devices
    reference = Run(model, cpu, "float32", steps)
    dense = reference.dense()
    print(f"{PROMPT_TOKENS} tokens, {steps} teacher-forced steps", flush=True)
    on_cpu = reference.ours()
    on_gpu = Run(model, gpu, "float32", steps)
    ours = on_gpu.ours()
    print(f"float32, {gpu} against {cpu}: pariskv {same(ours, on_cpu):.4f}, dense {same(on_gpu.dense(), dense):.4f}")
    half = Run(model, gpu, "bfloat16", steps)
    print(
        f"bfloat16 against dense float32: pariskv {same(half.ours(), dense):.4f}, dense {same(half.dense(), dense):.4f}"
        f"; pariskv float32 {same(on_cpu, dense):.4f}"
    )


class Run:
    """The model on one device in one dtype, over the same text."""

    def __init__(self, model: str, device: str, dtype: str, steps: int):
        overrides = [f"model.name={model}", f"model.device={device}", f"model.dtype={dtype}"]
        self.session = Session.load(ROOT / "configs/smollm2.yaml", overrides)
        text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        tokens = self.session.model.encode([text], "off").tokens[:, : PROMPT_TOKENS + steps]
        assert tokens.shape[1] == PROMPT_TOKENS + steps
        self.tokens, self.steps = tokens, steps

    @torch.no_grad()
    def ours(self) -> Tensor:
        """The largest logit's token after each of the steps' tokens [T]."""
        lm = self.session.model
        cache, batch = lm.new_cache(self.session.config), Batch(self.tokens[:, :PROMPT_TOKENS])
        sampler = Sampler(GenerationConfig(temperature=0.0), 1)
        logits = prefill(lm, cache, batch, self.steps)
        steps = make_steps(lm, cache, batch, sampler, self.session.config.runtime, logits.device)
        forced = self.tokens[:, PROMPT_TOKENS:]
        return torch.cat([steps.step(forced[:, step : step + 1]).clone() for step in range(self.steps)]).cpu()

    @torch.no_grad()
    def dense(self) -> Tensor:
        with self.session.model.dense() as cache:
            model = self.session.model.model
            out = model(input_ids=self.tokens, cache=cache, logits_to_keep=self.steps)
        return torch.as_tensor(out.logits[0].argmax(dim=-1)).cpu()


def same(one: Tensor, other: Tensor) -> float:
    return float((one == other).float().mean())


if __name__ == "__main__":
    chosen = ("cpu", "cuda" if torch.cuda.is_available() else "cpu")
    name = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL
    main(name, int(sys.argv[2]) if len(sys.argv) > 2 else 1000, chosen)
