"""One SGLang engine on the CPU as a process of a test: answers each line of JSON with one.

    sglang_engine.py MODEL ATTENTION_BACKEND

Requests: {"prompts": lists of token ids, "rids": their names, "tokens": n} gives token_ids, a list
for each, and cached, the tokens of each prompt that were not computed. {"text": token ids, "first": n}
gives, for each token from the n-th on, how far its log-probability is below the likeliest token's.
"""

import json
import os
import sys
import time

os.environ.update(HF_HUB_OFFLINE="1")


def below_likeliest(engine, text, first):
    """Nats, of text[first:], each given what comes before it."""
    output = engine.generate(
        input_ids=text,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=first - 1,
        top_logprobs_num=1,
    )
    said = output["meta_info"]
    count = len(text) - first
    tokens = said["input_token_logprobs"][-count:]
    likeliest = said["input_top_logprobs"][-count:]
    assert [token for _, token, _ in tokens] == text[first:]
    return [best[0][0] - logprob for (logprob, _, _), best in zip(tokens, likeliest)]


def main():
    # Answers go to a descriptor of their own: what the engine prints is its log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    began = time.monotonic()
    from sglang.srt.entrypoints.engine import Engine

    def answer(**fields):
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    engine = Engine(
        model_path=sys.argv[1],
        device="cpu",
        attention_backend=sys.argv[2],
        disable_overlap_schedule=True,
        mem_fraction_static=0.1,
        max_total_tokens=4096,
        context_length=1024,
        skip_server_warmup=True,
        log_level="info",
    )
    answer(seconds=time.monotonic() - began)
    for line in sys.stdin:
        request = json.loads(line)
        if "text" in request:
            answer(below=below_likeliest(engine, request["text"], request["first"]))
            continue
        sampling = {"temperature": 0, "max_new_tokens": request["tokens"], "ignore_eos": True}
        outputs = engine.generate(
            input_ids=request["prompts"], sampling_params=sampling, rid=request["rids"]
        )
        answer(
            token_ids=[output["output_ids"] for output in outputs],
            cached=[output["meta_info"]["cached_tokens"] for output in outputs],
        )
    engine.shutdown()


if __name__ == "__main__":
    main()
