#!/usr/bin/env bash
# The steps of action.yml: github.sh install|check|diff|digest|convert. Inputs are variables of the environment.
set -euo pipefail

place="${RUNNER_TEMP:?}/ckpttool-environment"
tool="$place/bin/ckpttool"

# arguments: the words of $ARGUMENTS into the array `words`, quoted as in a shell. Nothing in them is executed.
arguments() {
  mapfile -d '' words < <("$place/bin/python" -c '
import os, shlex, sys
for word in shlex.split(os.environ["ARGUMENTS"]):
    sys.stdout.write(word + "\0")
')
}

# summary TITLE FILE: what a step printed, on the summary page of the run. A fence longer than any in the text.
summary() {
  {
    printf '### %s\n\n``````text\n' "$1"
    cat "$2"
    printf '``````\n\n'
  } >>"$GITHUB_STEP_SUMMARY"
}

case "${1:?}" in
  install)
    "$PYTHON" -c 'import sys; sys.exit("ckpttool needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
    "$PYTHON" -m venv "$place"
    "$place/bin/python" -m pip install --quiet --disable-pip-version-check "${PACKAGE:-$GITHUB_ACTION_PATH}"
    "$tool" --version
    ;;
  check)
    options=(--check --findings "github=$RUNNER_TEMP/ckpttool-annotations")
    if [ "$VALUES" = true ]; then options+=(--values); fi
    if [ -n "$SARIF" ]; then options+=(--findings "sarif=$SARIF"); fi
    if [ -n "$JUNIT" ]; then options+=(--findings "junit=$JUNIT"); fi
    status=0
    "$tool" inspect "$SOURCE" "${options[@]}" >"$RUNNER_TEMP/ckpttool-check" || status=$?
    cat "$RUNNER_TEMP/ckpttool-check"
    summary "ckpttool: check" "$RUNNER_TEMP/ckpttool-check"
    if [ -f "$RUNNER_TEMP/ckpttool-annotations" ]; then
      cat "$RUNNER_TEMP/ckpttool-annotations"
      printf 'findings=%d\n' "$(grep -c '^::error ' "$RUNNER_TEMP/ckpttool-annotations" || true)" >>"$GITHUB_OUTPUT"
    fi
    exit "$status"
    ;;
  diff)
    options=()
    if [ "$HEADERS_ONLY" = true ]; then options+=(--headers-only); fi
    status=0
    "$tool" inspect "$SOURCE" --diff "$OTHER" "${options[@]}" >"$RUNNER_TEMP/ckpttool-diff" || status=$?
    cat "$RUNNER_TEMP/ckpttool-diff"
    summary "ckpttool: difference" "$RUNNER_TEMP/ckpttool-diff"
    case "$status" in
      0) if grep -q '^equal: ' "$RUNNER_TEMP/ckpttool-diff"; then printf 'equal=true\n' >>"$GITHUB_OUTPUT"; fi ;;
      3)
        printf 'equal=false\n' >>"$GITHUB_OUTPUT"
        printf '::error title=ckpttool diff::the checkpoints differ; the summary of this run says how\n'
        ;;
    esac
    exit "$status"
    ;;
  digest)
    digest=$("$tool" inspect "$SOURCE" --hash --total --quiet)
    key=$(printf '%s\n%s\n%s\n' "$("$tool" --version)" "$digest" "$ARGUMENTS" | sha256sum | cut -c1-40)
    printf 'digest=%s\nkey=ckpttool-%s\n' "$digest" "$key" >>"$GITHUB_OUTPUT"
    ;;
  convert)
    arguments
    mkdir -p "$(dirname "$OUTPUT")"
    "$tool" reshard "$SOURCE" "$OUTPUT" "${words[@]}"
    ;;
  *)
    printf 'github.sh: no step %s\n' "$1" >&2
    exit 2
    ;;
esac
