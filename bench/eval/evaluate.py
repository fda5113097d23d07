#!/usr/bin/env python3
"""Quality of a real model whose attention reads from CertKV: evaluate.py --help, or ./dev eval.

Every result is a file in build/eval; what is there is not done again. So a run can be ended at any
time and goes on with the next call. report.py makes the page from the results.
"""

import argparse
import contextlib
import functools
import json
import pathlib
import time

import numpy as np
import torch

import attention
import certkv
import certkv.transformers
import models
from retrieval import make_question

WINDOW = 512  # tokens
FIRST = 64  # tokens before it see no stored block: their reads are exact
# Tokens of a window that are computed as prefill, and tokens that are not counted.
PREFILLS = {"prose": FIRST, "code": FIRST, "outliers": FIRST, "copy": WINDOW // 2}
UNCOUNTED = {**PREFILLS, "copy": WINDOW // 2 + 8}  # it isn't plain at once what is copied
QUESTION = 1536  # tokens of a retrieval prompt
CONTINUED = 256  # tokens of the prompt that is continued greedily

UNGATED = {"read_mode": "OBSERVE"}
DEFAULT = {"tv_tolerance": 0.2, "value_tolerance": 0.1}
TIGHT = {"tv_tolerance": 0.05, "value_tolerance": 0.02}
GATES = {"ungated": UNGATED, "gated": DEFAULT, "tight": TIGHT}
FORMATS = {
    "K8V4": ("K8", "V4"),
    "K8V8": ("K8", "V8"),
    "K6V4": ("K6", "V4"),
    "FP8": ("FP8_E4M3", "V8"),
    "FP8-scaled": ("FP8_E4M3", "V8"),  # with calibrated scales
    "K4V8": ("K4", "V8"),
}
# In the order in which they are run: what matters most first, and what repairs much last.
TIERS = (
    ("FP16", "K8V4 ungated"),
    ("K4V8 ungated", "K8V4 tight"),
    ("FP8 ungated", "K8V8 ungated", "K4V8 gated"),
    ("FP8 gated", "K8V4 gated", "FP8-scaled ungated"),
    ("K6V4 ungated", "K6V4 gated", "K8V8 gated"),
    ("FP8-scaled gated", "K6V4 tight"),
)
CONFIGURATIONS = [name for tier in TIERS for name in tier]
# Affine formats per channel don't see that a channel is scaled, so two of them are enough.
OUTLIERS = ("FP16", "FP8 ungated", "FP8-scaled ungated", "FP8 gated", "FP8-scaled gated")
OUTLIERS += ("K8V4 ungated", "K4V8 ungated")
GREEDY = ("FP16", "K8V4 ungated", "K8V4 tight", "K8V8 gated", "K4V8 ungated", "K4V8 gated")
GREEDY += ("FP8 ungated", "FP8 gated")
STAGES = {  # and the configurations of each
    "prose": CONFIGURATIONS,
    "code": CONFIGURATIONS,
    "copy": CONFIGURATIONS,  # random tokens, twice
    "outliers": OUTLIERS,  # prose read by the model with outlier channels
    "retrieval": CONFIGURATIONS,
    "greedy": GREEDY,
}
SIZES = {
    # Windows, or questions, or prompts that are continued by so many tokens.
    "quick": {"prose": 2, "code": 1, "copy": 1, "outliers": 1, "retrieval": 3, "greedy": 0},
    "full": {"prose": 12, "code": 6, "copy": 6, "outliers": 2, "retrieval": 6, "greedy": 1},
}
GREEDY_TOKENS = 256


class Evaluation:
    """Runs what has no result yet, until the deadline."""

    def __init__(self, folder, server, tokenizer, model):
        self.folder, self.server = folder, server
        self.tokenizer, self.model = tokenizer, model
        self.deadline = float("inf")  # of time.monotonic()
        self.configurations = CONFIGURATIONS  # that are worked on
        self._run = 0

    def windows(self, kind, count):
        """Token ids of `count` windows."""
        if kind == "copy":
            return models.copies(count, WINDOW)
        text = models.texts()["code" if kind == "code" else "prose"]
        return models.windows(self.tokenizer, text, count, WINDOW)

    @functools.cached_property
    def calibration(self):
        return models.calibration_windows(self.tokenizer, WINDOW)

    @functools.cached_property
    def outlier_model(self):
        """The model with outlier channels; which, is chosen on the calibration windows."""
        chosen = models.choose_outliers(self.model, self.calibration)
        print(f"outliers: pair of channel {chosen[0]}, times {chosen[1]:g}", flush=True)
        return models.make_outliers(models.load()[1], *chosen)

    @functools.lru_cache(maxsize=None)
    def scales(self, model):
        """Of each layer's FP8 keys, chosen on the calibration windows."""
        model.set_attn_implementation(attention.IMPLEMENTATION)
        return models.fp8_scales(model, self.calibration)

    @contextlib.contextmanager
    def reader(self, configuration, model):
        """None for FP16, else a Reader of that format and gate."""
        if configuration == "FP16":
            yield None
            return
        name, gate = configuration.split()
        self._run += 1
        scales = self.scales(model) if name == "FP8-scaled" else [1.0]
        with contextlib.ExitStack() as stack:
            caches = []
            for scale in scales:
                others = {"fp8_key_scale": scale} if name == "FP8-scaled" else {}
                spec = attention.spec_for(model.config, *FORMATS[name], **others)
                client = stack.enter_context(certkv.Client(spec, self.server.target))
                request = client.open_request(f"evaluation-{time.time_ns()}", **GATES[gate])
                caches.append((client, stack.enter_context(request)))
            yield attention.Reader(caches, self._run)

    def missing(self, stage, item):
        """Those of the configurations that are worked on which have no result."""
        wanted = [c for c in self.configurations if c in STAGES[stage]]
        return [c for c in wanted if not self.path(stage, item, c).exists()]

    def late(self):
        return time.monotonic() > self.deadline

    def path(self, stage, item, configuration):
        return self.folder / f"{stage}-{item:02}-{configuration.replace(' ', '_')}.json"

    def result(self, stage, item, configuration):
        return json.loads(self.path(stage, item, configuration).read_text())

    def save(self, stage, item, configuration, result):
        path = self.path(stage, item, configuration)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"configuration": configuration, **result}))
        partial.rename(path)
        print(f"{stage} {item} {configuration}: {result['summary']}", flush=True)

    def window(self, kind, item, ids):
        """Perplexity of one window under every configuration."""
        model = self.outlier_model if kind == "outliers" else self.model
        first, prefill = UNCOUNTED[kind], PREFILLS[kind]
        cache = None
        for configuration in self.missing(kind, item):
            if self.late():
                return
            if cache is None:
                cache = attention.cache_of(model, ids[:prefill])
            began = time.monotonic()
            with self.reader(configuration, model) as reader:
                logits = attention.logits_of(model, ids, reader, cache)[first - prefill :]
                nll = torch.nn.functional.cross_entropy(
                    logits[:-1].double(), ids[first + 1 :], reduction="none"
                )
                top = logits.argmax(-1).tolist()
                base = top
                if configuration != "FP16":
                    base = self.result(kind, item, "FP16")["token_ids"]
                result = {
                    "summary": f"perplexity {float(nll.mean().exp()):.4f}",
                    "nll_sum": float(nll.sum()),
                    "token_count": len(nll),
                    "nll_of_64": [float(part.mean()) for part in nll.split(64) if len(part) == 64],
                    "token_ids": top,
                    "same_top_token": sum(one == other for one, other in zip(top, base)),
                    "top_token_count": len(top),
                    "seconds": time.monotonic() - began,
                    **read_record(reader, len(ids) - prefill),
                }
                self.save(kind, item, configuration, result)

    def question(self, item):
        """An answer's digits that are the model's first choice, each given those before."""
        prompt, answer, what = make_question(self.tokenizer, item, QUESTION)
        ids = torch.tensor(prompt + answer)
        cache = None
        for configuration in self.missing("retrieval", item):
            if self.late():
                return
            if cache is None:
                # All but the prompt's last token is computed as prefill, the rest as decode steps.
                cache = attention.cache_of(self.model, ids[: len(prompt) - 1])
            with self.reader(configuration, self.model) as reader:
                logits = attention.logits_of(self.model, ids, reader, cache)
                right = int((logits[:-1].argmax(-1) == torch.tensor(answer)).sum())
                result = {
                    "summary": f"{right} of {len(answer)} digits, {what}",
                    "right": right,
                    "digit_count": len(answer),
                    "prompt_token_count": len(prompt),
                    "what": what,
                    **read_record(reader, 0),
                }
                self.save("retrieval", item, configuration, result)

    def greedy(self, item, count):
        """Greedy decoding of one prompt with certkv.transformers, against plain FP16."""
        text = models.texts()["prose" if item % 2 == 0 else "code"]
        ids = models.windows(self.tokenizer, text, count + 2, CONTINUED)[item + 1][None]
        for configuration in self.missing("greedy", item):
            if self.late():
                return
            began = time.monotonic()
            made, records = self.continued(ids, configuration)
            seconds = time.monotonic() - began
            base = made
            if configuration != "FP16":
                base = self.result("greedy", item, "FP16")["token_ids"]
            same = [one == other for one, other in zip(made, base)]
            first = same.index(False) if False in same else len(same)
            result = {
                "summary": f"{first} tokens until another",
                "first_other": first,
                "same": sum(same),
                "token_count": len(same),
                "token_ids": made,
                "seconds": seconds,
                **certificate_record(records),
            }
            self.save("greedy", item, configuration, result)

    def continued(self, ids, configuration):
        """(new token ids, their certificates or None)."""
        if configuration == "FP16":
            return plain_greedy(self.model, ids[0], GREEDY_TOKENS), None
        name, gate = configuration.split()
        self.model.set_attn_implementation(certkv.transformers.IMPLEMENTATION)
        with certkv.transformers.CertifiedCache(
            self.model,
            self.server.target,
            key_format=FORMATS[name][0],
            value_format=FORMATS[name][1],
            original_dtype="float16",
            model_name=f"evaluation-{name}-{gate}",
            **GATES[gate],
        ) as cache, torch.inference_mode():
            made = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                do_sample=False,
                max_new_tokens=GREEDY_TOKENS,
                min_new_tokens=GREEDY_TOKENS,
                pad_token_id=0,
            )
            return made[0, ids.shape[1] :].tolist(), cache.certificates()

    def work(self, stage, count):
        """All items of a stage, in the configurations that are worked on."""
        if stage == "retrieval":
            for item in range(count):
                self.question(item)
        elif stage == "greedy":
            for item in range(count):
                self.greedy(item, count)
        else:
            for item, ids in enumerate(self.windows(stage, count)):
                self.window(stage, item, ids)


def plain_greedy(model, ids, token_count):
    """New token ids by plain attention over 16-bit keys and values."""
    model.set_attn_implementation(attention.IMPLEMENTATION)
    text, past, new = [], None, ids
    with torch.inference_mode():
        for _ in range(token_count):
            call = model(input_ids=new[None], past_key_values=past, use_cache=True)
            past, new = call.past_key_values, call.logits[0, -1:].argmax(-1)
            text.append(int(new))
    return text


def read_record(reader, token_count):
    """What the certificates of a run say, and time in the kernels."""
    if reader is None:
        return {}
    record = certificate_record(np.concatenate(reader.certificates))
    if token_count:
        record["read_us_per_token"] = reader.read_ns / 1e3 / token_count
    return record


def certificate_record(records):
    if records is None:
        return {}
    # Reads that see no stored block are exact and say nothing about the format.
    records = records[records["query_position"] >= FIRST]
    first = records["first_worst_case_tv"]
    return {
        "read_count": len(records),
        "rungs": np.bincount(records["rung"], minlength=6).tolist(),
        "exact_reads": int((records["outcome"] == certkv.Outcome.EXACT).sum()),
        "observed_reads": int((records["outcome"] == certkv.Outcome.OBSERVED).sum()),
        "first_tv_within": {str(t): int((first <= t).sum()) for t in (0.05, 0.1, 0.2)},
        "repair_bytes": int(records["repair_bytes"].sum()),
        "read_bytes": int(records["read_bytes"].sum()),
        "largest_worst_case_tv": float(records["worst_case_tv"].max()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small part of everything")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after about this long")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/eval"))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    options = parser.parse_args()
    size = SIZES["quick" if options.quick else "full"]
    folder = options.folder / ("quick" if options.quick else "full")
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    # A scale of each layer is a cache of each layer.
    config = "kvstore:\n  cache_limit: 256\n"
    with certkv.embedded(config) as server:
        evaluation = Evaluation(folder, server, *models.load())
        evaluation.deadline = time.monotonic() + 60 * options.minutes
        # A run that is ended has all items of the configurations that matter most.
        for tier in TIERS:
            evaluation.configurations = tier
            for stage in options.stages:
                evaluation.work(stage, size[stage])


if __name__ == "__main__":
    main()
