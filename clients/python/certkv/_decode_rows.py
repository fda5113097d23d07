"""DecodeRows: requests of an engine whose decode steps are read from the store."""

from __future__ import annotations

import hashlib
import logging
import pathlib
import re
from collections.abc import Iterable
from typing import Any, Callable, Optional

import numpy as np
import torch

from certkv import _errors
from certkv._client import Client, Sequence
from certkv._reads import Attention
from certkv._request import Request
from certkv._store_link import StoreLink

_OPENINGS_MAX = 16  # of one request id

# Puts what a request has so far into the store.
Prefix = Callable[[Client], Sequence]


class DecodeRow:
    """A request that decodes.

    Attributes:
        request_id: the engine's.
        name: at gate; another where that one has ended.
        token_count: its tokens, with the one that is computed now.
        client, sequence, attention, request: None when it goes on without the store.
        records: certificates, an array for each read.
    """

    def __init__(self, request_id: str, name: str) -> None:
        self.request_id, self.name = request_id, name
        self.token_count = 0
        self.client: Optional[Client] = None
        self.sequence: Optional[Sequence] = None
        self.attention: Optional[Attention] = None
        self.request: Optional[Request] = None
        self.records: list[np.ndarray] = []

    @property
    def is_certified(self) -> bool:
        return self.attention is not None

    def drop(self) -> None:
        """From here on without the store."""
        self.client = self.sequence = self.attention = self.request = None


class DecodeRows:
    """A row for each request. An error of the store never ends a request: its row goes on without
    the store, which is logged, and the engine's own attention over its own keys and values is the
    answer. Not safe from several threads.

    Args:
        link: of the store.
        engine: its name, for requests whose ids gate can't have.
        terms: of Client.open_request.
        certificates: folder for a request's certificates when it ends, as REQUEST.npy; "" = none.
        log: gets a line for each request that goes on without the store.
    """

    def __init__(
        self,
        link: StoreLink,
        engine: str,
        terms: dict[str, Any],
        certificates: str,
        log: logging.Logger,
    ) -> None:
        self._link, self._engine, self._log = link, engine, log
        self._terms, self._certificates = terms, certificates
        self._rows: dict[str, DecodeRow] = {}

    def __getitem__(self, request_id: str) -> DecodeRow:
        return self._rows[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def begin_token(
        self,
        request_id: str,
        token_count: int,
        token_id: int,
        prefix: Prefix,
        name: str = "",
    ) -> DecodeRow:
        """The next step computes this token of the request.

        Args:
            token_count: its tokens with that one.
            prefix: puts the tokens before it into the store; called when the request is new here, or went back
                (preempted, retracted) and was computed again. May raise certkv.Error.
            name: under which gate knows the request, unless it had one of that name before; "" =
                request_id.
        """
        row = self._rows.get(request_id)
        if row is not None and row.token_count != token_count - 1:
            self.end(request_id)
            row = None
        is_new = row is None
        if row is None:
            row = self._rows[request_id] = DecodeRow(request_id, name or request_id)
        row.token_count = token_count
        try:
            if is_new:
                self._open(row, prefix)
            elif row.is_certified:
                row.sequence.finish_token()  # of the last step; a full block is sealed here
            if row.is_certified:
                row.sequence.begin_token(token_id)
        except _errors.Error as error:
            self._give_up(row, error)
        return row

    def read(
        self, row: DecodeRow, layer: int, query: Any, key: Any, value: Any
    ) -> Optional[torch.Tensor]:
        """Writes a layer of the token, and reads it.

        Args:
            query, key, value: one token's, any shape.

        Returns:
            [query heads * d_v] of the query's dtype, certified or exact; None where the engine's
            own attention is to answer.
        """
        if not row.is_certified:
            return None
        spec = self._link.spec
        try:
            row.sequence.write_layer(
                layer,
                key.reshape(spec.kv_head_count, spec.head_dim).contiguous(),
                value.reshape(spec.kv_head_count, spec.value_dim).contiguous(),
            )
            queries = query.reshape(spec.query_head_count, spec.head_dim).float().contiguous()
            read = row.attention.attend(layer, row.token_count - 1, queries)
            row.records.append(read.certificates)
            return torch.from_numpy(read.outputs).reshape(-1).to(query.dtype)
        except _errors.Error as error:
            self._give_up(row, error)
            return None

    def keep(self, request_ids: Iterable[str]) -> None:
        """Ends all others."""
        kept = set(request_ids)
        for request_id in [name for name in self._rows if name not in kept]:
            self.end(request_id)

    def end(self, request_id: str) -> None:
        """Closes the request's account and writes its certificates. Unknown ids are ignored."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        self._release(row)
        if self._certificates and row.records:
            name = re.sub(r"[^a-zA-Z0-9._-]", "_", row.name)
            path = pathlib.Path(self._certificates) / f"{name}.npy"
            try:
                np.save(path, np.concatenate(row.records))
            except OSError as error:
                self._log.warning("CertKV: certificates of %s are lost: %s", row.request_id, error)

    def _open(self, row: DecodeRow, prefix: Prefix) -> None:
        """Puts what the request has so far into the store."""
        client = row.client = self._link.client()
        if client is None:
            raise _errors.error_of("UNAVAILABLE", "", "the store is away")
        row.sequence = prefix(client)
        self._open_request(client, row)
        row.attention = client.attention(row.sequence, row.request)

    def _open_request(self, client: Client, row: DecodeRow) -> None:
        """The request at gate. Names of requests that have ended, as before a preemption, are
        spent: then it is called by the engine's id, and after that "ID.2", "ID.3", ..."""
        names = [row.name, row.request_id] if row.name != row.request_id else [row.name]
        names += [f"{row.request_id}.{opening}" for opening in range(2, _OPENINGS_MAX + 1)]
        for name in map(self._valid_name, names):
            try:
                row.request = client.open_request(name, **{"model": "", **self._terms})
                row.name = name
                return
            except _errors.Error as error:
                if error.reason != "REQUEST_CLOSED" or name == self._valid_name(names[-1]):
                    raise

    def _valid_name(self, name: str) -> str:
        if re.fullmatch(r"[a-zA-Z0-9._-]{1,128}", name):
            return name
        # Gate's ids have no other characters.
        return f"{self._engine}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"

    def _give_up(self, row: DecodeRow, error: _errors.Error) -> None:
        """Its tokens are computed by the engine's own attention from here on."""
        self._log.warning(
            "CertKV: request %s goes on with the engine's own attention, without certificates: %s",
            row.request_id,
            error,
        )
        if row.client is not None and self._link.report(row.client, error):
            row.drop()  # the link closes the client, and so what it made
        self._release(row)

    def _release(self, row: DecodeRow) -> None:
        parts = (row.attention, row.sequence, row.request)
        row.drop()
        for part in parts:
            if part is None:
                continue
            try:
                if isinstance(part, Request):
                    part.finish()
                part.close()
            except _errors.Error as error:
                self._log.warning("CertKV: ending request %s: %s", row.request_id, error)
