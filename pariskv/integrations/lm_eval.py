"""lm-evaluation-harness on a session: every task of its that generates, through the retrievers of a configuration.

>>> from lm_eval import simple_evaluate
>>> simple_evaluate(ParisLM(Session.load("configs/smollm2.yaml")), tasks=["gsm8k"], limit=10)

Tasks that compare the likelihoods of given answers are refused: they read them in a prefill, which is dense, so no
retriever would run. Needs the extra `[eval]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from lm_eval.api.model import LM

from pariskv.errors import ConfigError
from pariskv.evaluation.tasks.answering import Prompt, answer
from pariskv.lengths import refuse_beyond_context
from pariskv.session import Session

KNOWN = ("until", "max_gen_toks", "max_tokens", "do_sample", "temperature", "top_k", "top_p")


class ParisLM(LM):  # type: ignore[misc,unused-ignore]
    """A session as the harness wants a model; each batch of requests gets a fresh cache.

    batch  requests that are decoded together
    """

    def __init__(self, session: Session, batch: int = 1):
        super().__init__()
        self.session, self.batch = session, batch

    @property
    def tokenizer_name(self) -> str:
        """What the harness keeps its own cache of prompts by."""
        return self.session.config.model.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as the tokenizer's template has them."""
        template = self.session.model.tokenizer.apply_chat_template
        return str(
            template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuations, each cut before the first of its stop texts."""
        found: list[str] = []
        for start in range(0, len(requests), self.batch):
            part = [one.args for one in requests[start : start + self.batch]]
            # Requests of one task share their settings; others are answered apart.
            same = all(settings == part[0][1] for _, settings in part)
            for group in [part] if same else [[one] for one in part]:
                found += self._generate([context for context, _ in group], dict(group[0][1]))
        return found

    def _generate(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        if unknown := sorted(set(settings) - set(KNOWN)):
            raise ConfigError(f"the task wants {', '.join(unknown)} of its generation, known are {', '.join(KNOWN)}")
        model, config = self.session.model, self.session.config
        generation = config.generation
        new = int(settings.get("max_gen_toks", settings.get("max_tokens", generation.max_new_tokens)))
        is_sampled = settings.get("do_sample", float(settings.get("temperature") or 0) > 0)
        temperature = float(settings.get("temperature", generation.temperature)) if is_sampled else 0.0
        top_k = int(settings.get("top_k", generation.top_k))
        top_p = float(settings.get("top_p", generation.top_p))
        generation = replace(generation, temperature=temperature, top_k=top_k, top_p=top_p)
        rows = [model.encode([context], "off").tokens[0].tolist() for context in contexts]
        refuse_beyond_context(config, model.context_length, max(map(len, rows)), new, "a prompt of the task")
        prompts = [Prompt(row, 1, generation.seed) for row in rows]
        answers = answer(model, replace(config, generation=generation), prompts, new)
        stops = settings.get("until") or []
        return [cut_before(one.text, [stops] if isinstance(stops, str) else stops) for one in answers]

    def loglikelihood(self, requests: Sequence[Any]) -> NoReturn:
        """Refused: ConfigError says why."""
        raise ConfigError(
            "the task compares the likelihoods of given answers: they are read in the prefill, which is dense; "
            "nothing is decoded and no retriever runs, so the score would say nothing. Use a task that generates "
            "(generate_until), such as its cot or generative variant"
        )

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> NoReturn:
        """Refused as `loglikelihood` is."""
        self.loglikelihood(requests)


def cut_before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stop texts."""
    ends = [text.index(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else text
