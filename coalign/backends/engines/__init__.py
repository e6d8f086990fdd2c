"""Generation engines: they compute the tokens of a policy. Open contract.py first.

contract.py: InferenceEngine and GenerationSession, what every engine implements. session_driver.py: SessionDriver,
which steps sessions for all that generates. rollout_module.py: RolloutModule, the policy module around an engine.
request.py and sampling.py: requests and samples, token draws. episodes.py: environments. native/ and transformers.py:
the engines of the core; coalign-vllm brings another. meta_model.py: the model of those that compute in this process.
"""
