"""From a task's model to one that can be trained."""

import torch

from tests import own_tasks, runs


def test_gradients_that_a_task_left_on_its_model_do_not_count():
    class Pretrained(own_tasks.Plain):
        def model(self):
            model = super().model()
            self.loss(model, self.train_data()[:10]).backward()
            return model

    left, _ = runs.fit(Pretrained(), runs.config())
    expected, _ = runs.by_hand(own_tasks.Plain())
    assert runs.difference(left, expected) < 1e-10
    assert all(torch.isfinite(tensor).all() for tensor in left.values())
