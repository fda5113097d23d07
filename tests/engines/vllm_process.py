"""vLLM engines as processes of a test."""

import dataclasses
import json
import pathlib
import time

from engine_process import EngineProcess

ROOT = pathlib.Path(__file__).parents[2]
NEW_TOKENS = 6
_ENGINE = pathlib.Path(__file__).with_name("vllm_engine.py")


def connector(store, kind="CertKVConnector", module="certkv.vllm", **options):
    return {
        "kv_connector": kind,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": store.target, **options},
    }


@dataclasses.dataclass
class Answer:
    """Greedy tokens of a prompt.

    Attributes:
        cached: tokens of the prompt that were not computed.
        seconds: from request to last token.
    """

    token_ids: list[int]
    cached: int
    seconds: float


class Engine(EngineProcess):
    """A process with one vLLM engine, see vllm_engine.py."""

    def __init__(self, folder, model, name, transfer, processes="one"):
        self.kill_order = folder / f"{name}.kill"
        super().__init__(
            folder,
            name,
            _ENGINE,
            [model, json.dumps(transfer), processes],
            [ROOT / "build/release/python", _ENGINE.parent],
            CERTKV_TEST_KILL=str(self.kill_order),
        )

    def ask(self, prompt, tokens=NEW_TOKENS):
        return self.ask_together([prompt], tokens)[0]

    def ask_together(self, prompts, tokens=NEW_TOKENS):
        """Answers to prompts that are computed in the same steps."""
        answer = self._request(prompts=prompts, tokens=tokens)
        return [Answer(*parts, answer["seconds"]) for parts in answer["answers"]]

    def below_likeliest(self, prompt, new):
        """How far below the likeliest token vLLM's own attention finds each of the new ones, in
        nats."""
        return self._request(text=prompt + new, first=len(prompt))["below"]

    def ask_until_loaded(self, prompt):
        """Without the engine's own prefix cache; again while saves of the last time may go on."""
        for _ in range(3):
            self.forget()
            answer = self.ask(prompt)
            if answer.cached > 0:
                break
            time.sleep(1)
        return answer

    def forget(self):
        """Drops the engine's own prefix cache."""
        assert self._request(forget=True)["forgot"]
