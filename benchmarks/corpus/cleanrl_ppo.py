"""Reinforcement learning in one file, as CleanRL writes it: PPO with vector environments of gymnasium."""

import gymnasium as gym
import numpy as np
from digest import digest
from torch.distributions.categorical import Categorical

import torch
from torch import nn

torch.manual_seed(0)
ENVS, STEPS, MINIBATCHES = 16, 128, 4
envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * ENVS)


def layer_init(layer, std=np.sqrt(2)):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, 0.0)
    return layer


def net(out, std):
    return nn.Sequential(layer_init(nn.Linear(4, 512)), nn.Tanh(), layer_init(nn.Linear(512, 512)), nn.Tanh(),
                         layer_init(nn.Linear(512, out), std=std))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic, self.actor = net(1, 1.0), net(2, 0.01)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
obs, actions, logprobs, rewards, dones, values = (torch.zeros((STEPS, ENVS, *s)) for s in ((4,), (), (), (), (), ()))
next_obs, next_done = torch.tensor(envs.reset(seed=0)[0]), torch.zeros(ENVS)
for iteration in range(2):
    for step in range(STEPS):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            actions[step], logprobs[step], _, value = agent.get_action_and_value(next_obs)
            values[step] = value.flatten()
        found, reward, term, trunc, _ = envs.step(actions[step].numpy().astype(int))
        rewards[step], next_obs, next_done = torch.tensor(reward), torch.tensor(found), torch.tensor(term | trunc).float()
    returns = rewards.flip(0).cumsum(0).flip(0) * 0.01
    flat = [x.reshape(STEPS * ENVS, *x.shape[2:]) for x in (obs, actions, logprobs, returns, values)]
    for epoch in range(2):
        for index in torch.randperm(STEPS * ENVS).chunk(MINIBATCHES):
            o, a, old, ret, val = (x[index] for x in flat)
            _, new, entropy, value = agent.get_action_and_value(o, a)
            ratio, advantage = (new - old).exp(), ret - val
            policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = policy - 0.01 * entropy.mean() + 0.5 * (value.flatten() - ret).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            print(iteration, loss.item(), flush=True)
print(digest(agent))
