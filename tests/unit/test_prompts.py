"""Prompt files, and their token ids with and without a chat template."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sequoia_vllm.prompts import (
    Prompt,
    PromptError,
    describe_prompts,
    encode_prompts,
    load_prompts,
    load_tokenizer,
    prompts_sha256,
)

MODELS = Path(__file__).parents[2] / "examples" / "models"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(MODELS / "target"))


def test_the_built_in_set():
    prompts = load_prompts(None)
    assert len(prompts) == 64 == len({prompt.prompt for prompt in prompts})
    assert load_prompts(None, 5) == prompts[:5]
    assert describe_prompts(None, prompts)["prompts"] == "built-in"
    for count, message in ((65, "holds 64 prompts, not 65"), (0, "at least one")):
        with pytest.raises(PromptError, match=message):
            load_prompts(None, count)
    with pytest.raises(ValidationError):
        prompts[0].prompt = "b"  # frozen


def test_files(tmp_path):
    path, text = tmp_path / "p.jsonl", tmp_path / "p.txt"
    chat = {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "hé"}]}
    path.write_text(
        '{"prompt": "a\\nb", "id": 3}\n\n' + json.dumps(chat, ensure_ascii=False) + "\r\n"
    )
    first, second = load_prompts(path)
    assert first == Prompt(prompt="a\nb")
    assert [message.content for message in second.messages] == ["", "hé"]
    assert describe_prompts(path, [first])["prompts"] == "p.jsonl"
    # Unicode's line separators do not split a line.
    path.write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert load_prompts(path) == [Prompt(prompt="a\u2028b\x85c")]
    text.write_bytes(b"\xef\xbb\xbfone\r\n\n  two \n")
    assert load_prompts(text) == [Prompt(prompt="one"), Prompt(prompt="  two ")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('"text"', "line 2: "),
        ("{}", r'line 2: a line holds \{"prompt": "text"\} or'),
        ('{"prompt": ""}', "line 2: prompt: .*at least 1 character"),
        ('{"prompt": 7}', "line 2: prompt: .*valid string"),
        ('{"messages": []}', "line 2: messages: "),
        ('{"messages": [{"role": "user"}]}', r"line 2: messages.0.content: Field required"),
        ('{"prompt": "a", "messages": [{"role": "u", "content": ""}]}', "line 2: a line holds"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "is to be generated: cut it"),
    ],
)
def test_wrong_lines(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(PromptError, match=message):
        load_prompts(path)
    assert load_prompts(path, 1) == [Prompt(prompt="a")]  # it is not reached


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "name a file with --prompts"),
        ("p.csv", b"a", r"give a \.jsonl file.* or a \.txt file"),
        ("p.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("p.txt", b"\n \n", "holds 0 prompts, not any"),
    ],
)
def test_wrong_files(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError, match=message):
        load_prompts(tmp_path / name)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_the_hash_is_of_the_content(texts):
    prompts = [Prompt(prompt=text) for text in texts]
    digest = prompts_sha256(prompts)
    assert digest == prompts_sha256([Prompt.model_validate(p.model_dump()) for p in prompts])
    assert digest != prompts_sha256([*prompts, Prompt(prompt="x")])
    assert digest != prompts_sha256([Prompt(prompt=texts[0] + "x"), *prompts[1:]])
    assert len(digest) == 64


def test_without_a_template_prompts_are_encoded_as_they_are(tokenizer):
    assert encode_prompts([Prompt(prompt="def f():")], tokenizer) == [tokenizer.encode("def f():")]
    chat = Prompt(messages=[{"role": "user", "content": "a"}])
    with pytest.raises(PromptError, match="no chat template: give bare texts"):
        encode_prompts([chat], tokenizer)


def test_with_a_template_prompts_are_turns():
    chat_tokenizer = load_tokenizer(str(MODELS / "target"))
    chat_tokenizer.chat_template = TEMPLATE
    bare = Prompt(prompt="a")
    chat = Prompt(messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "a"}])
    texts = [chat_tokenizer.decode(ids) for ids in encode_prompts([bare, chat], chat_tokenizer)]
    assert texts == ["<user>a<assistant>", "<system>s<user>a<assistant>"]
    raw = encode_prompts([bare, chat], chat_tokenizer, raw=True)
    assert [chat_tokenizer.decode(ids) for ids in raw] == ["a", texts[1]]
    chat_tokenizer.chat_template = "{{ raise_exception('only users speak here') }}"
    with pytest.raises(PromptError, match="template refuses a prompt: only users speak here"):
        encode_prompts([bare], chat_tokenizer)


def test_a_prompt_without_tokens_and_no_tokenizer():
    silent = SimpleNamespace(chat_template=None, encode=lambda text: [])
    with pytest.raises(PromptError, match="prompt 1 has no tokens"):
        encode_prompts([Prompt(prompt="a")], silent)
    with pytest.raises(PromptError, match=r"no tokenizer for the target.*none/such/model"):
        load_tokenizer("none/such/model")
