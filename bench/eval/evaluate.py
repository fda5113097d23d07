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
FIRST = 64  # tokens before it see no stored block, so nothing is counted of them

UNGATED = {"read_mode": "OBSERVE"}
DEFAULT = {"tv_tolerance": 0.2, "value_tolerance": 0.1}
TIGHT = {"tv_tolerance": 0.05, "value_tolerance": 0.02}
GATES = {"ungated": UNGATED, "gated": DEFAULT, "tight": TIGHT}
FORMATS = {
    "K8V4": ("K8", "V4"),
    "K8V8": ("K8", "V8"),
    "K6V4": ("K6", "V4"),
    "FP8": ("FP8_E4M3", "V8"),
    "K4V8": ("K4", "V8"),
}
# K8V8 and K8V4 are what CertKV recommends, the others what it is compared with.
CONFIGURATIONS = ["FP16"] + [
    f"{name} {gate}"
    for name in FORMATS
    for gate in GATES
    if gate != "tight" or name in ("K8V4", "K8V8", "K6V4")
]
# Affine formats per channel don't see that a channel is scaled, so one of them is enough.
OUTLIERS = ["FP16", "K8V4 ungated", "K8V4 tight", "FP8 ungated", "FP8 gated"]
GREEDY = ["FP16"] + [f"{name} {gate}" for name in ("K8V4", "K8V8") for gate in ("ungated", "tight")]
SIZES = {
    # Windows of prose, code, prose with outlier channels; questions; tokens decoded greedily.
    "quick": {"prose": 2, "code": 1, "outliers": 1, "retrieval": 4, "greedy": 0},
    "full": {"prose": 16, "code": 6, "outliers": 4, "retrieval": 24, "greedy": 256},
}


class Evaluation:
    """Runs what has no result yet, until the deadline."""

    def __init__(self, folder, server):
        self.folder, self.server = folder, server
        self.tokenizer, self.model = models.load()
        self.deadline = float("inf")  # of time.monotonic()
        self._run = 0

    def texts(self, counts):
        """kind -> windows of token ids."""
        out = {}
        for kind, count in counts.items():
            text = models.texts()["code" if kind == "code" else "prose"]
            out[kind] = models.windows(self.tokenizer, text, count, WINDOW)
        return out

    @functools.cached_property
    def outlier_model(self):
        return models.make_outliers(models.load()[1])

    @contextlib.contextmanager
    def reader(self, configuration):
        """None for FP16, else a Reader of that format and gate."""
        if configuration == "FP16":
            yield None
            return
        name, gate = configuration.split()
        self._run += 1
        spec = attention.spec_for(self.model.config, *FORMATS[name])
        with certkv.Client(spec, self.server.target) as client:
            with client.open_request(f"evaluation-{time.time_ns()}", **GATES[gate]) as request:
                yield attention.Reader(client, request, self._run)

    def missing(self, stage, item):
        """Configurations that have no result; none when time is up."""
        if time.monotonic() > self.deadline:
            return []
        wanted = {"outliers": OUTLIERS, "needles": OUTLIERS, "greedy": GREEDY}
        wanted = wanted.get(stage, CONFIGURATIONS)
        return [c for c in wanted if not self.path(stage, item, c).exists()]

    def path(self, stage, item, configuration):
        return self.folder / f"{stage}-{item:02}-{configuration.replace(' ', '-')}.json"

    def save(self, stage, item, configuration, result):
        path = self.path(stage, item, configuration)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"configuration": configuration, **result}))
        partial.rename(path)
        print(f"{stage} {item} {configuration}: {result['summary']}", flush=True)

    def window(self, kind, item, ids):
        """Perplexity of one window under every configuration."""
        configurations = self.missing(kind, item)
        if not configurations:
            return
        model = self.outlier_model if kind == "outliers" else self.model
        base = attention.logits_of(model, ids)
        for configuration in configurations:
            if time.monotonic() > self.deadline:
                return
            began = time.monotonic()
            with self.reader(configuration) as reader:
                logits = base if reader is None else attention.logits_of(model, ids, reader)
                nll = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
                nll = nll[FIRST:].double()
                same = logits[FIRST:].argmax(-1) == base[FIRST:].argmax(-1)
                stretches = [float(part.mean()) for part in nll.split(64) if len(part) == 64]
                self.save(
                    kind,
                    item,
                    configuration,
                    {
                        "summary": f"perplexity {float(nll.mean().exp()):.4f}",
                        "nll_sum": float(nll.sum()),
                        "token_count": len(nll),
                        "nll_of_64": stretches,
                        "same_top_token": int(same.sum()),
                        "top_token_count": len(same),
                        "seconds": time.monotonic() - began,
                        **read_record(reader, len(ids)),
                    },
                )

    def question(self, stage, item):
        """An answer's digits that are the model's first choice, each given those before."""
        configurations = self.missing(stage, item)
        if not configurations:
            return
        model = self.outlier_model if stage == "needles" else self.model
        prompt, answer, what = make_question(self.tokenizer, item, WINDOW)
        ids = torch.tensor(prompt + answer)
        # The prompt but for its last token is computed as prefill; the rest are decode steps.
        cache = attention.cache_of(model, ids[: len(prompt) - 1])
        for configuration in configurations:
            with self.reader(configuration) as reader:
                logits = attention.logits_of(model, ids, reader, cache)
                right = int((logits[:-1].argmax(-1) == torch.tensor(answer)).sum())
                self.save(
                    stage,
                    item,
                    configuration,
                    {
                        "summary": f"{right} of {len(answer)} digits, {what}",
                        "right": right,
                        "digit_count": len(answer),
                        "what": what,
                        **read_record(reader, 0),
                    },
                )

    def greedy(self, token_count):
        """Greedy decoding of one prompt with certkv.transformers, against plain FP16."""
        if token_count == 0:
            return
        ids = models.windows(self.tokenizer, models.texts()["prose"], 3, 256)[1][None]
        base = None
        for configuration in self.missing("greedy", 0):
            if time.monotonic() > self.deadline:
                return
            began = time.monotonic()
            if configuration == "FP16" or base is None:
                base = decode(self.model, ids, None, token_count)
            text, records = base, None
            if configuration != "FP16":
                began = time.monotonic()
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
                ) as cache:
                    text = decode(self.model, ids, cache, token_count)
                    records = cache.certificates()
            same = text == base
            first = int((~same).nonzero()[0]) if not bool(same.all()) else token_count
            self.save(
                "greedy",
                0,
                configuration,
                {
                    "summary": f"{first} tokens until another",
                    "first_other": first,
                    "same": int(same.sum()),
                    "token_count": token_count,
                    "seconds": time.monotonic() - began,
                    **certificate_record(records),
                },
            )


def decode(model, ids, cache, token_count):
    """New token ids, [token_count]. Without a cache: plain attention, 16-bit keys and values."""
    if cache is None:
        return plain_greedy(model, ids[0], token_count)
    with torch.inference_mode():
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=token_count,
            min_new_tokens=token_count,
            pad_token_id=0,
        )
    return made[0, ids.shape[1] :]


def plain_greedy(model, ids, token_count):
    model.set_attn_implementation(attention.IMPLEMENTATION)
    text, past, new = [], None, ids
    with torch.inference_mode():
        for _ in range(token_count):
            call = model(input_ids=new[None], past_key_values=past, use_cache=True)
            past, new = call.past_key_values, call.logits[0, -1:].argmax(-1)
            text.append(int(new))
    return torch.tensor(text)


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
    options = parser.parse_args()
    size = SIZES["quick" if options.quick else "full"]
    folder = options.folder / ("quick" if options.quick else "full")
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    config = "kvstore:\n  cache_limit: 64\n"
    with certkv.embedded(config) as server:
        evaluation = Evaluation(folder, server)
        evaluation.deadline = time.monotonic() + 60 * options.minutes
        # One item of each kind after the other, so that a run that is ended has some of all.
        work = evaluation.texts({kind: size[kind] for kind in ("prose", "code", "outliers")})
        for item in range(max(size.values())):
            for kind, windows in work.items():
                if item < len(windows):
                    evaluation.window(kind, item, windows[item])
            for question in range(2 * item, min(2 * item + 2, size["retrieval"])):
                evaluation.question("retrieval", question)  # the model itself
                evaluation.question("needles", question)  # with outlier channels
            if item == 2:
                evaluation.greedy(size["greedy"])


if __name__ == "__main__":
    main()
