"""One vLLM engine as a process of a test: reads a JSON request from each line of its input and
answers with one line of JSON.

    vllm_engine.py MODEL CONNECTOR PROCESSES

CONNECTOR: a JSON object for KVTransferConfig, or null. PROCESSES: "one", which starts in a third of
the time, or "several", as vLLM has by default (front end, scheduler, worker). Requests: {"prompt":
token ids, "tokens": n} gives token ids, cached tokens and seconds; {"forget": true} drops the
engine's own prefix cache.
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
        began = time.monotonic()
        sampling = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True)
        prompt = {"prompt_token_ids": request["prompt"]}
        (output,) = engine.generate([prompt], sampling, use_tqdm=False)
        answer(
            token_ids=list(output.outputs[0].token_ids),
            cached=output.num_cached_tokens,
            seconds=time.monotonic() - began,
        )


if __name__ == "__main__":
    main()
