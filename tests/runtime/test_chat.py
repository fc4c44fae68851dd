"""Chat templates render as transformers renders them; hostile ones are refused in one line."""

from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from sitsc.core.errors import RequestError, TokenizerError
from sitsc.runtime.chat import ChatTemplate, special_token_names
from tests.runtime.tokenizers_for_tests import byte_level

CHATML = """{% for message in messages %}
{% if loop.first and message.role != 'system' %}
<|im_start|>system
You are kind.<|im_end|>
{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{% endif %}"""

HEADERS = """{{- bos_token }}
{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'}}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>' }}{%- endif %}"""

TURNS = """{%- set ns = namespace(last='', turns=0) %}
{%- for message in messages %}
    {%- if message.role == ns.last %}
        {{- raise_exception('roles must alternate: ' ~ message.role) }}
    {%- endif %}
    {%- set ns.last = message.role %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- if ns.turns > 8 %}{%- break %}{%- endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}[{{ ns.turns }}] {{ message.content }}{{ eos_token }}{%- endgeneration %}
    {%- else %}
        {{- '[INST] ' ~ {'text': message.content, 'é': '<&>'} | tojson ~ ' [/INST]' }}
    {%- endif %}
{%- endfor %}
{{- strftime_now('%Y') | length }}{{ thinking | default('off') }}{{ dict(a=1)['a'] }}"""

TALK = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": 'Où est <la> "gare" & 🚉?\n'},
    {"role": "assistant", "content": "Là."},
    {"role": "user", "content": "Merci"},
]
TOOL = {"type": "function", "function": {"name": "søk", "parameters": {"b": [1, None], "a": True}}}
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}


@pytest.mark.parametrize("template", [CHATML, HEADERS, TURNS])
@pytest.mark.parametrize("talk", [TALK, TALK[:2], TALK[1:]])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("extra", [{}, {"tools": [TOOL]}, {"thinking": "on"}])
def test_equal_to_transformers(template, talk, prompt, extra) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **TOKENS)
    expected = theirs.apply_chat_template(
        talk, chat_template=template, tokenize=False, add_generation_prompt=prompt, **extra
    )
    ours = ChatTemplate(template, TOKENS)
    assert ours.render(talk, add_generation_prompt=prompt, **extra) == expected


def test_the_templates_own_refusal_reaches_the_user() -> None:
    with pytest.raises(RequestError, match="roles must alternate: user"):
        ChatTemplate(TURNS, TOKENS).render([TALK[1], TALK[3]])


def test_the_clock_can_be_fixed() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render([]) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "safe"),
        ("{% set ns = namespace(__class__=1) %}", "__class__"),
        ("{% set ns = namespace() %}{% set ns.__call__ = 1 %}", "__call__"),
        ("{% for i in range(999999999) %}{% endfor %}", "range"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
        ("{{ 1 / 0 }}", "zero"),
        ("{{ missing.attribute }}", "missing"),
    ],
)
def test_hostile_or_broken_templates_are_one_line(template: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        ChatTemplate(template).render(TALK)
    assert "\n" not in str(caught.value)


def test_where_the_template_comes_from() -> None:
    config = {
        "chat_template": [
            {"name": "tool_use", "template": "no"},
            {
                "name": "default",
                "template": "{{ bos_token }}{{ eos_token }}{{ messages | length }}",
            },
        ],
        "bos_token": {"content": "<b>", "special": True},
        "eos_token": "</b>",
        "pad_token": None,
    }
    assert special_token_names(config) == {"bos_token": "<b>", "eos_token": "</b>"}
    assert ChatTemplate.from_config(config).render(TALK) == "<b></b>4"
    assert ChatTemplate.from_config(config, "own {{ bos_token }}").render(TALK) == "own <b>"


@pytest.mark.parametrize(
    "config", [{}, {"chat_template": None}, {"chat_template": [{"name": "rag", "template": "x"}]}]
)
def test_no_template(config) -> None:
    with pytest.raises(TokenizerError, match=r"no chat template.*completion works"):
        ChatTemplate.from_config(config)


def test_template_that_does_not_parse() -> None:
    with pytest.raises(TokenizerError, match="cannot be parsed"):
        ChatTemplate("{% for %}")


LISTS_ONLY = """{% for message in messages %}{{ message['role'] + ': ' }}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}
{%- endfor %}{% endfor %}"""
TEXT_OR_LIST = """{% for message in messages %}{% if message['content'] is string %}
{{- message['content'] | trim }}{% else %}{% for part in message['content'] %}
{%- if part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}
{%- endfor %}"""


def test_an_image_is_refused_in_one_line():
    for kind in ("image", "image_url", "input_audio", "video"):
        parts = [{"type": "text", "text": "What is this?"}, {"type": kind}]
        with pytest.raises(RequestError, match=f"holds '{kind}'.*compiled for text alone"):
            ChatTemplate(TEXT_OR_LIST).render([{"role": "user", "content": parts}])


def test_a_template_that_reads_texts_only_gets_the_parts_as_one():
    """Whether it fails on a list, or writes it out."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": parts}]
    for sum_of in ("'<' + m.content + '>'", "'<' ~ m.content ~ '>'"):
        template = "{% for m in messages %}{{ " + sum_of + " }}{% endfor %}"
        assert ChatTemplate(template).render(messages) == "<Hi><Hello>"
    with pytest.raises(RequestError, match="has no text"):
        ChatTemplate(TEXT_OR_LIST).render([{"role": "user", "content": [{"type": "text"}]}])


def test_a_template_that_reads_lists_only_does_not_lose_the_text():
    message = [{"role": "user", "content": "What is two plus two?"}]
    assert ChatTemplate(LISTS_ONLY).render(message) == "user: What is two plus two?"
    assert ChatTemplate(TEXT_OR_LIST).render(message) == "What is two plus two?"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert ChatTemplate(TEXT_OR_LIST).render(parts) == "Hello"
    # One that shortens what it is given is left alone.
    assert ChatTemplate("{{ messages[0]['content'][:4] }}").render(message) == "What"
