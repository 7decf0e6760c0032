"""What calls the profiler of torchtitan's config is there in released wheels."""

from __future__ import annotations


def test_its_trainer_builds_the_profiler_of_its_config_and_steps_it(code) -> None:
    module = code("torchtitan", "0.3.0", "torchtitan/trainer.py")
    assert "profiler: Profiler.Config" in str(module)
    train = str(module.classes["Trainer"].functions["train"])
    assert "with config.profiler.build(global_step=self.step, base_folder=config.dump_folder) as profiler:" in train
    assert train.index("self.step += 1") < train.index("self.train_step(") < train.index("profiler.step()")
