"""What tests of certified decode share: a small model, attention by its definition, and what must
hold of certificates."""

import json
import subprocess

import certkv
import numpy as np
import pytest
import torch
from conftest import ROOT, dense_attention

LAYERS, KV_HEADS, HEADS, DIM = 2, 2, 4, 64
# Outputs are rounded to bfloat16, relative to the largest number of the output.
ROUNDING = 2.0**-8
# Logits below 32 are multiples of 1/8 in bfloat16. Two that differ by less than two steps may
# change places when attention is rounded otherwise, and so may greedy text.
NEAR_TIE = 2 * 0.125


def prompt_ids(count, seed):
    return np.random.default_rng(seed).integers(1, 1000, count).tolist()


def states(layer, ids, first):
    """q, k, v of tokens at first, first + 1, ...: [tokens, heads, DIM] bfloat16, which depend on
    the token and its place."""
    parts = []
    for kind, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)):
        rows = []
        for place, token in enumerate(ids, first):
            seed = ((token * 512 + place) * LAYERS + layer) * 3 + kind
            row = torch.randn(heads, DIM, generator=torch.Generator().manual_seed(seed))
            rows.append(row * (1.5 if kind == 0 else 1.0))
        parts.append(torch.stack(rows).to(torch.bfloat16))
    return parts


def truth_of(ids, layer, drop=0):
    """Attention of the last token by the definition, [heads, DIM]; without the last `drop` keys."""
    q, k, v = states(layer, ids, 0)
    keys, values = (t.transpose(0, 1).float().numpy()[:, : len(ids) - drop] for t in (k, v))
    return dense_attention(q[-1].float().numpy(), keys, values, DIM**-0.5)


def distance(output, truth):
    """Of each head, and the rounding of its output to bfloat16."""
    output = output.view(HEADS, DIM).float().numpy()
    return np.linalg.norm(output - truth, axis=1), ROUNDING * np.linalg.norm(truth, axis=1)


def check_step_within_bounds(ids, outputs, records):
    """One decode step of the small model.

    Args:
        ids: all tokens.
        outputs, records: of each layer.

    Returns:
        (largest share of a bound that was used, the same of attention without the last key).
    """
    assert len(records) == LAYERS
    used = wrong = 0.0
    for layer, (output, record) in enumerate(zip(outputs, records)):
        assert set(record["layer"]) == {layer}
        assert set(record["query_position"]) == {len(ids) - 1}
        bound = record["output_error_bound"]
        error, rounding = distance(output, truth_of(ids, layer))
        assert np.all(error <= bound + rounding)
        used = max(used, (error / (bound + rounding)).max())
        error, rounding = distance(output, truth_of(ids, layer, drop=1))
        wrong = max(wrong, (error / (bound + rounding)).max())
    return used, wrong


def check_every_step_has_certificates(records, prompt, steps, layers, heads, tolerance):
    """Certificates of a request whose prompt has so many tokens."""
    keys = {(r["query_position"], r["layer"], r["query_head"]) for r in records}
    assert len(records) == steps * layers * heads
    assert keys == {
        (prompt + step, layer, head)
        for step in range(steps)
        for layer in range(layers)
        for head in range(heads)
    }
    exact = records["outcome"] == certkv.Outcome.EXACT
    assert np.all(exact | (records["worst_case_tv"] <= np.float32(tolerance)))
    assert np.mean(records["outcome"] == certkv.Outcome.CERTIFIED) > 0.5


def ask_risk(target, request_id):
    """What `certkv risk` says, as JSON."""
    program = ROOT / "build" / "release" / "bin" / "certkv"
    return json.loads(
        subprocess.run(
            [program, "--target", target, "--json", "risk", request_id],
            check=True,
            capture_output=True,
        ).stdout
    )


def check_risk(risk, records):
    """Gate's account is of these certificates."""
    assert int(risk["read_count"]) == len(records)
    worst = float(records["first_worst_case_tv"].max())
    assert float(risk["risk_score"]) == pytest.approx(worst, rel=1e-5)
