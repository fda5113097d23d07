"""One vLLM engine as a process of a test: reads a JSON request from each line of its input and
answers with one line of JSON.

    vllm_engine.py MODEL CONNECTOR PROCESSES

CONNECTOR: a JSON object for KVTransferConfig, or null. PROCESSES: "one", which starts in a third of
the time, or "several", as vLLM has by default (front end, scheduler, worker). Requests: {"prompts":
lists of token ids, "tokens": n} gives answers, token ids and cached tokens of each, and seconds;
{"text": token ids, "first": n} gives, for each token from the n-th on, how far its log-probability
is below the likeliest token's; {"forget": true} drops the engine's own prefix cache.
"""

import json
import os
import sys
import time

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="1" if sys.argv[3:] == ["several"] else "0",
)


def below_likeliest(engine, text, first, sampling):
    """Nats, of text[first:], each given what comes before it; computed as a prompt."""
    (output,) = engine.generate([{"prompt_token_ids": text}], sampling, use_tqdm=False)
    below = []
    for token, logprobs in zip(text[first:], output.prompt_logprobs[first:]):
        best = max(logprob.logprob for logprob in logprobs.values())
        below.append(best - logprobs[token].logprob)
    return below


def main():
    # Answers go to a descriptor of their own: what the engine prints is its log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    began = time.monotonic()
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    def answer(**fields):
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    connector = json.loads(sys.argv[2])
    engine = LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        kv_transfer_config=KVTransferConfig(**connector) if connector else None,
    )
    answer(seconds=time.monotonic() - began)
    for line in sys.stdin:
        request = json.loads(line)
        if "forget" in request:
            answer(forgot=engine.reset_prefix_cache())
            continue
        if "text" in request:
            sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
            answer(below=below_likeliest(engine, request["text"], request["first"], sampling))
            continue
        began = time.monotonic()
        sampling = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        answer(
            answers=[
                (list(output.outputs[0].token_ids), output.num_cached_tokens) for output in outputs
            ],
            seconds=time.monotonic() - began,
        )


if __name__ == "__main__":
    main()
