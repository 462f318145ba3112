"""The requests that lm-evaluation-harness 0.4.13 sends, and what it reads of the answers, as its source has it.

That it really gets its figures this way is shown by `make test-clients`, which installs it.
"""

from typing import Any

import httpx2 as httpx
import pytest
from running import Running

COMPLETIONS = "/v1/completions"


def test_what_it_asks_of_the_tokenizer(drafted: Running) -> None:
    assert isinstance(httpx.get(f"{drafted.url}/tokenizer_info").json()["eos_token"], str)
    tokens = drafted.post("/tokenize", prompt="test", add_special_tokens=False)["tokens"]
    assert tokens
    assert all(isinstance(token, int) for token in tokens)


@pytest.mark.parametrize("texts", [["hello world 1 2"], ["hello world 1 2", "12 hello", "hello hello hello"]])
def test_a_log_likelihood_request_u88(drafted: Running, texts: list[str]) -> None:
    """Lists of ids, one token of output that is thrown away, sums from the context to the last but one, `is_greedy`."""
    encode = drafted.service.model.tokenizer.encode
    prompts = [encode(text, add_bos=False) for text in texts]
    own = drafted.complete(prompts[0], max_tokens=6, ignore_eos=True, return_token_ids=True)["choices"][0]["token_ids"]
    prompts[0] += own  # what is greedy must be found to be
    body: dict[str, Any] = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    answer = drafted.post(COMPLETIONS, **body, seed=1234, echo=True)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(prompts)
    found = set()
    for prompt, choice in zip(prompts, choices, strict=True):
        for context in range(1, len(prompt)):
            logprobs = choice["logprobs"]["token_logprobs"][context:-1]
            tops = choice["logprobs"]["top_logprobs"][context:-1]
            assert len(logprobs) == len(tops) == len(prompt) - context
            greedy = all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))
            said = drafted.complete(
                prompt[:context], max_tokens=len(prompt) - context, ignore_eos=True, return_token_ids=True
            )
            assert greedy == (said["choices"][0]["token_ids"] == prompt[context:])
            found.add(greedy)
    assert found == {True, False}


def test_an_answer_that_ends_at_once_still_has_its_entry(drafted: Running) -> None:
    """It drops the last entry unseen: with an end of sequence and no entry it would drop a token of the text."""
    prompt = drafted.service.model.tokenizer.encode("hello", add_bos=False)
    bias = {str(token): 100 for token in drafted.service.model.tokenizer.eos_ids[:1]}
    body: dict[str, Any] = {"prompt": [prompt], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    (choice,) = drafted.post(COMPLETIONS, **body, logit_bias=bias)["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1


def test_a_request_for_a_text(drafted: Running) -> None:
    prompts = [drafted.service.model.tokenizer.encode(text) for text in ("hello", "12 hello")]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "temperature": 0.0, "seed": 1234}
    answer = drafted.post(COMPLETIONS, prompt=prompts, stop=["Question:", "<|im_end|>"], **body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(isinstance(choice["text"], str) for choice in answer["choices"])
