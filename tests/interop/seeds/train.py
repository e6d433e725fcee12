"""The training program of the document's part on one host with several GPUs: a sampler that shares the samples out, and
an evaluation on one rank while the others wait.

What differs from the document is in README.md beside this file. usage: train.py TRAIN_FILE TEST_FILE MODEL_PATH
"""

import os
import sys

import torch
import torch.distributed as dist
from sentences import Model, SentenceDataset
from tessera.torch import DistributedDataParallel
from torch import nn
from torch.utils.data import DataLoader

EPOCHS = 3


def load_data(train_file, test_file, batch_size=32):
    train_dataset = SentenceDataset(train_file)
    test_dataset = SentenceDataset(test_file)

    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)

    train_dataloader = DataLoader(train_dataset, batch_size=batch_size, sampler=train_sampler)
    test_dataloader = DataLoader(test_dataset, batch_size=batch_size, shuffle=False)

    return train_dataloader, test_dataloader


def main():
    train_file, test_file, model_path = sys.argv[1:]
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(backend="tessera")

    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    MSE = nn.MSELoss()
    train_dataloader, test_dataloader = load_data(train_file, test_file)

    for epoch in range(EPOCHS):
        model.train()
        train_dataloader.sampler.set_epoch(epoch)
        for words, labels in train_dataloader:
            optimizer.zero_grad()
            MSE(model(words), labels).backward()
            optimizer.step()

        if local_rank == 0:
            with torch.no_grad():
                model.eval()
                errors = 0.0
                for words, labels in test_dataloader:
                    errors += MSE(model(words), labels).item() * len(labels)
                print(f"epoch {epoch}: test error {errors / len(test_dataloader.dataset):.9f}", flush=True)

    if local_rank == 0:
        torch.save({"model": model.state_dict()}, model_path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
