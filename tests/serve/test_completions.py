"""Completions over HTTP."""

from running import Running


def test_first(drafted: Running) -> None:
    answer = drafted.complete("hello world")
    print(answer)
    print(drafted.stream("/v1/completions", prompt="hello", max_tokens=5, logprobs=2))
    print(
        drafted.stream(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=5,
            logprobs=True,
            top_logprobs=1,
        )
    )
    assert 0
