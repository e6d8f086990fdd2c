"""Predicts what a step of training will cost on a cluster that need not be there.

Open ``prediction.py`` first: ``predict_step(JobShape, ClusterSpec, Constants) -> StepPrediction``.

| file | owns |
|---|---|
| `job.py` | what is to be predicted: models, layouts, lengths of responses |
| `gpus.py` | devices by their data sheets, clusters of them (`4x8:H100`) |
| `constants.py` | what data sheets do not say; a machine's own, measured ones |
| `model_size.py`, `hf_config.py` | sizes of a model, and how they are read from its configuration |
| `network.py` | collectives |
| `training.py` | passes that train or score |
| `generation.py` | decode steps and prefills of an engine |
| `simulation.py` | rollouts as discrete events |
| `transfer.py` | weight syncs, and states that move to host memory |
| `prediction.py` | a whole step |
| `memory.py` | memory of each device; `coalign check` reads it, too |
| `layouts/` | from a configuration to a job, partitions over devices, the search |

Nothing heavy is imported. docs/planner.md says how it predicts, and how far it was off on published figures.
"""
