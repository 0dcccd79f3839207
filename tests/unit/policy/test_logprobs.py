import pytest
import torch

from argusrl.policy.logprobs import token_logprobs


def case(count: int, *, train_head: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(count, 16, generator=generator).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).requires_grad_(train_head)
    targets = torch.randint(3, 50, (count,), generator=generator)
    return hidden, weight, targets


def plain(hidden, weight, targets, temperature: float, banned: list[int]):
    logits = hidden @ weight.T / temperature
    mask = torch.zeros(weight.shape[0]).index_fill(0, torch.tensor(banned, dtype=torch.long), float("-inf"))
    distribution = torch.distributions.Categorical(logits=logits + mask)
    return distribution.log_prob(targets), distribution.probs


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize(("temperature", "banned"), [(1.0, []), (0.7, [0, 2])])
@pytest.mark.parametrize("count", [1, 700])  # within a chunk, over the border of one
def test_equals_full_softmax_with_gradients(
    count: int, temperature: float, banned: list[int], train_head: bool
) -> None:
    hidden, weight, targets = case(count, train_head=train_head)
    ids = torch.tensor(banned, dtype=torch.long)
    logprobs, entropies = token_logprobs(hidden, weight, None, targets, temperature=temperature, banned=ids)
    factors = torch.linspace(-1, 1, count)
    (logprobs * factors).sum().backward()
    got = hidden.grad.clone(), None if weight.grad is None else weight.grad.clone()
    hidden.grad = weight.grad = None

    expected, probabilities = plain(hidden, weight, targets, temperature, banned)
    (expected * factors).sum().backward()
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[0], hidden.grad, atol=1e-5, rtol=1e-4)
    if train_head:
        torch.testing.assert_close(got[1], weight.grad, atol=1e-4, rtol=1e-4)
    entropy = -(probabilities * probabilities.clamp(min=1e-38).log()).sum(-1)
    torch.testing.assert_close(entropies, entropy, atol=1e-4, rtol=1e-4)
    assert not entropies.requires_grad


def test_no_tokens_still_reach_the_backward() -> None:
    hidden, weight, targets = case(3, train_head=False)
    none = torch.zeros(0, dtype=torch.long)
    logprobs, entropies = token_logprobs(hidden[none], weight, None, targets[none], temperature=1.0, banned=none)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() == 0
    assert entropies.shape == (0,)


def test_bias_counts() -> None:
    hidden, weight, targets = case(5, train_head=False)
    bias = torch.linspace(-2, 2, 50)
    none = torch.zeros(0, dtype=torch.long)
    logprobs, _ = token_logprobs(hidden, weight, bias, targets, temperature=1.0, banned=none)
    expected = torch.log_softmax(hidden @ weight.T + bias, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
