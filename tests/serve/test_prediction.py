"""OpenAI's predicted outputs: the answer is the same, it comes in fewer steps, and the counts are exact."""

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from parrot import parrot_service
from running import Running, start

CHAT = "/v1/chat/completions"
TEXT = "hello world 1 2 3 hello wor and more of it 4 5 6 until here"
BLOCK = 4


@pytest.fixture(scope="module", params=["alone", "beside a draft"])
def parrot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("predicted") / "model"
    with start(parrot_service(folder, 0 if request.param == "alone" else BLOCK, predicted=BLOCK)[0]) as running:
        yield running


def body(prediction: object, **more: object) -> dict:
    messages = [{"role": "user", "content": TEXT}]
    given = {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
    return {"messages": messages, "temperature": 0, **given, **more}


def details(answer: dict) -> tuple[int, int]:
    found = answer["usage"]["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def drafted_of(count: int) -> int:
    """Of a right prediction of so many tokens those that are drafted: between blocks the target says one itself."""
    return sum(min(BLOCK, count - at) for at in range(0, count, BLOCK + 1))


def test_a_right_prediction(parrot: Running) -> None:
    plain = parrot.post(CHAT, **body(None))
    assert details(plain) == (0, 0)
    count = len(parrot.service.model.tokenizer.encode(TEXT, add_bos=False))
    for content in (TEXT, [{"type": "text", "text": TEXT}]):
        answer = parrot.post(CHAT, **body(content, return_origins=True))
        assert answer["choices"][0]["message"] == plain["choices"][0]["message"]
        assert details(answer) == (drafted_of(count), 0)
        assert answer["usage"]["completion_tokens"] == count + 1
        assert answer["choices"][0]["origins"][: BLOCK + 1] == ["draft"] * BLOCK + ["free"]
        steps = answer["metrics"]["speculative_decoding"]["per_step_drafted"]
        assert len(steps) <= count // (BLOCK + 1) + 2
    events = parrot.stream(CHAT, **body(TEXT, stream_options={"include_usage": True}))
    assert details(events[-1]) == (drafted_of(count), 0)


def test_a_wrong_prediction(parrot: Running) -> None:
    """It costs one block, at the beginning."""
    answer = parrot.post(CHAT, **body("ZYXWVUT"))
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert details(answer) == (0, BLOCK)


def test_an_edit(parrot: Running) -> None:
    """What stands after the edit is drafted as well."""
    encode = parrot.service.model.tokenizer.encode
    answer = parrot.post(CHAT, **body(TEXT.replace(" and more of", " or")))
    assert answer["choices"][0]["message"]["content"] == TEXT
    accepted, rejected = details(answer)
    before, after = (len(encode(part, add_bos=False)) for part in TEXT.split(" and more of"))
    assert accepted > drafted_of(before) + drafted_of(after) - 2 * BLOCK
    assert 0 < rejected <= 2 * BLOCK


def test_what_a_stop_cuts_off_is_not_accepted(parrot: Running) -> None:
    """Blocks are cut at a stop string; a token that is not in the output is rejected, and never counted twice."""
    answer = parrot.post(CHAT, **body(TEXT, stop=[" 3"], return_token_ids=True))
    accepted, rejected = details(answer)
    origins = parrot.post(CHAT, **body(TEXT, stop=[" 3"], return_origins=True))["choices"][0]["origins"]
    assert accepted == origins.count("draft")
    steps = parrot.post(CHAT, **body(TEXT, stop=[" 3"], return_origins=True))["metrics"]["speculative_decoding"]
    assert accepted + rejected == sum(steps["per_step_drafted"])
    assert answer["usage"]["completion_tokens"] == len(origins)


def test_drafts_that_are_switched_off_are_off(parrot: Running) -> None:
    answer = parrot.post(CHAT, **body(TEXT, speculative={"enabled": False}))
    assert details(answer) == (0, 0)
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_a_prediction_that_is_no_text_is_refused_by_name(parrot: Running) -> None:
    answer = httpx.post(parrot.url + CHAT, json=body([{"type": "image_url"}]))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prediction.content[0]"
