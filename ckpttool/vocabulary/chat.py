"""Chat templates: builtin formats, the one that most inputs have, or a given text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ckpttool.errors import UsageError
from ckpttool.vocabulary.read import Vocabulary, read_bytes, read_json
from ckpttool.vocabulary.write import TEMPLATE

BUILTIN = {
    # Stanford Alpaca: the last system message comes first, then instructions and responses under headings.
    "alpaca": (
        "{%- set heading = {'user': '### Instruction:', 'user_context': '### Input:', 'assistant': '### Response:'} -%}"
        "{%- for m in (messages | selectattr('role', 'equalto', 'system') | list)[-1:] -%}"
        "{{- m.content | trim + '\\n\\n' -}}"
        "{%- endfor -%}"
        "{%- for m in messages if m.role in heading -%}"
        "{{- heading[m.role] + '\\n' + m.content | trim + '\\n\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt and messages[-1].role != 'assistant' -%}"
        "{{- heading.assistant + '\\n' -}}"
        "{%- endif -%}"
    ),
    # OpenAI's ChatML.
    "chatml": (
        "{%- for m in messages -%}"
        "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    ),
    # LG EXAONE 3: an empty system turn comes first if there is none; the user's turn ends with its line.
    "exaone": (
        "{%- if messages and messages[0].role != 'system' -%}{{- '[|system|][|endofturn|]\\n' -}}{%- endif -%}"
        "{%- for m in messages -%}"
        "{{- '[|' + m.role + '|]' + m.content + ('\\n' if m.role == 'user' else '[|endofturn|]\\n') -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '[|assistant|]' -}}{%- endif -%}"
    ),
    # Meta Llama 3.
    "llama3": (
        "{%- for m in messages -%}"
        "{%- if loop.first -%}{{- bos_token -}}{%- endif -%}"
        "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
    ),
    # Mistral and Mixtral: a system message stands before the first instruction, turns alternate.
    "mistral": (
        "{%- set ns = namespace(before='', turn='user') -%}"
        "{{- bos_token -}}"
        "{%- for m in messages -%}"
        "{%- if loop.first and m.role == 'system' -%}{%- set ns.before = m.content + '\\n\\n' -%}"
        "{%- elif m.role != ns.turn -%}"
        "{{- raise_exception('after a system message, user and assistant must take turns') -}}"
        "{%- elif m.role == 'user' -%}"
        "{{- ' [INST] ' + ns.before + m.content + ' [/INST]' -}}"
        "{%- set ns.before = '' -%}{%- set ns.turn = 'assistant' -%}"
        "{%- else -%}"
        "{{- ' ' + m.content + eos_token -}}{%- set ns.turn = 'user' -%}"
        "{%- endif -%}"
        "{%- endfor -%}"
    ),
}


def chat_template(asked: str, vocabularies: Sequence[Vocabulary]) -> str | None:
    """The text of the chat template that a recipe asks for.

    ``asked``: a builtin's name, the Jinja text itself, or ``auto``: the one that most models have (the first of
    equals), None if none has any. Raises UsageError for anything else, IncompleteError and CorruptError when a
    model's files cannot be read.
    """
    if asked in BUILTIN:
        return BUILTIN[asked]
    if asked == "auto":
        found = Counter([t for v in vocabularies if (t := own_template(v))])
        return found.most_common(1)[0][0] if found else None
    if "{" not in asked:
        raise UsageError(
            f"chat template {asked!r:.60} is neither known nor Jinja",
            hint=f"known are {', '.join(BUILTIN)} and auto",
        )
    return asked


def own_template(vocabulary: Vocabulary) -> str:
    """A model's chat template, stripped; "" if it has none."""
    if TEMPLATE in vocabulary.names:
        return read_bytes(vocabulary.directory / TEMPLATE).decode(errors="replace").strip()
    for name in ("chat_template.json", "tokenizer_config.json"):
        if name in vocabulary.names:
            template = read_json(vocabulary.directory / name).get("chat_template")
            if isinstance(template, list):  # [{name, template}, ...]
                named = {str(t.get("name")): t.get("template") for t in template if isinstance(t, dict)}
                template = named.get("default")
            if isinstance(template, str) and template.strip():
                return template.strip()
    return ""
