"""Port of our TF MirroredStrategy trainer to PyTorch."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PER_REPLICA_BATCH = 8
EPOCHS = 2


def compute_loss(per_example, global_batch_size):
    return per_example.sum() / global_batch_size


def create_dataset():
    g = torch.Generator().manual_seed(5)
    x = torch.rand(128, 16, generator=g)
    y = (x.sum(1) * 10).long() % 4
    return TensorDataset(x, y)


def create_model():
    return nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    global_batch_size = PER_REPLICA_BATCH * dist.get_world_size()
    dataset = create_dataset()
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=PER_REPLICA_BATCH, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(create_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_object = nn.CrossEntropyLoss(reduction="none")

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for x, y in loader:
            per_example = loss_object(model(x), y)
            loss = compute_loss(per_example, global_batch_size)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.stack([per_example.detach().sum(), torch.tensor(float(len(x)))])
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"Epoch {epoch + 1}, Loss: {(sums[0] / sums[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
