# Installs the engines into build/engines; sourced by ./dev, whose functions it uses.
# shellcheck shell=bash

# install_pins LOCK [PIP ARGUMENTS]: what tests/engines/LOCK names, into build/engines/venv.
install_pins() {
  local lock="$1"
  shift
  build/engines/venv/bin/pip install -q --disable-pip-version-check --no-deps --require-hashes \
    --retries 10 --only-binary :all: -r "tests/engines/$lock" "$@" ||
    fail "pip failed; see its output above"
}

# install_engines [vllm|sglang]: HF Transformers, and what is named, unless they are there already.
# SGLang needs what vLLM brings, and lies beside it: the two pin packages that others would find.
install_engines() {
  local venv=build/engines/venv overlay=build/engines/sglang lock
  # A copy of each lock, written last, says what is installed; what was interrupted is done again.
  for lock in transformers.lock vllm.lock; do
    [[ ! -e "$venv/$lock" ]] || cmp -s "tests/engines/$lock" "$venv/$lock" || rm -rf "$venv"
  done
  if [[ ! -e "$venv/transformers.lock" ]]; then
    phase "Installing HF Transformers and torch into $venv: 680 MB to download, 1.7 GB on disk, 1 to 7 minutes"
    rm -rf "$venv"
    /usr/bin/python3 -m venv "$venv"
    install_pins transformers.lock
    "$venv/bin/python" tests/engines/make_cuda_stubs.py \
      "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
    cp tests/engines/transformers.lock "$venv"
  fi
  if [[ -n "${1:-}" && ! -e "$venv/vllm.lock" ]]; then
    phase "Installing vLLM and LMCache into $venv: 430 MB to download, 1.4 GB on disk, 1 to 6 minutes"
    install_pins vllm.lock
    cp tests/engines/vllm.lock "$venv"
  fi
  if [[ "${1:-}" == sglang ]] && ! cmp -s tests/engines/sglang.lock "$overlay/sglang.lock"; then
    phase "Installing SGLang into $overlay: 334 MB to download, 1.3 GB on disk, 1 to 5 minutes"
    rm -rf "$overlay"
    install_pins sglang.lock --target "$overlay"
    cp tests/engines/sglang.lock "$overlay"
  fi
}

# prepare_engines [vllm|sglang]: builds the Python client and installs engines; leaves in ROOT, with
# both in PYTHON.
prepare_engines() {
  local path=build/release/python
  [[ "${1:-}" != sglang ]] || path+=:build/engines/sglang
  install_packages "${PYTHON_PACKAGES[@]}" "${ENGINE_PACKAGES[@]}" || return 1
  build_preset release certkv certkv_python certkvd
  cd "$ROOT"
  (
    flock 9
    install_engines "$@"
  ) 9>build/engines.lock
  PYTHON=(env "PYTHONPATH=$path" PYTHONDONTWRITEBYTECODE=1 build/engines/venv/bin/python)
}
