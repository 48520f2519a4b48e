#!/usr/bin/env bash
# A first look at ckpttool on a checkpoint of eight tensor-parallel ranks; `make demo` runs it.
# Each command can be repeated as it is shown. What they write stays in build/demo (or the folder given).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-build/demo}
mkdir -p "$out"
out=$(realpath --relative-to=. "$out")
rm -rf "$out/tp2" "$out/hf"

run() {
  printf '\n$ %s\n' "$*"
  "$@"
}

run ckpttool reshard fixtures/llama_tp8 "$out/tp2" --tp-out 2 --verify
run ckpttool inspect "$out/tp2"
run ckpttool reshard "$out/tp2" "$out/hf" --to hf --verify
run ckpttool diff fixtures/llama_tp8 "$out/hf"
