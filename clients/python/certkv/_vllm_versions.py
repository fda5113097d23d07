"""Which versions of vLLM this was tested with; imports nothing of it."""

TESTED_VERSIONS = "0.32"
"""0.32.x. CERTKV_ANY_VERSION=1 tries others."""
