"""A connector whose store is killed between a lookup that hits and the load."""

import os
import pathlib
import signal

from certkv.vllm import CertKVConnector


class KillingConnector(CertKVConnector):
    """Kills the process whose id is in the file $CERTKV_TEST_KILL when a load begins."""

    def start_load_kv(self, forward_context, **kwargs):
        order = pathlib.Path(os.environ["CERTKV_TEST_KILL"])
        if self._get_connector_metadata().loads and order.exists():
            os.kill(int(order.read_text()), signal.SIGKILL)
            order.unlink()
        super().start_load_kv(forward_context, **kwargs)
