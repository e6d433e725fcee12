"""The document's DeepSpeed loop: training by an engine, whose checkpoints are named by the loss.

What differs from the document is in README.md beside this file. usage: deepspeed_train.py TRAIN_FILE
--save_dir DIRECTORY [--load_dir DIRECTORY --ckpt_id ID] [--save_interval N] --deepspeed --deepspeed_config FILE
"""

import argparse
from itertools import islice

import tessera.torch.engine as deepspeed
import torch
from sentences import Model, SentenceDataset
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


class ModelWithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, batch):
        words, labels = batch
        return nn.functional.mse_loss(self.model(words.half()).float(), labels)


def dataloader_to_step(data_loader, step):
    return islice(enumerate(data_loader), step, None)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("train_file")
    parser.add_argument("--save_dir", required=True)
    parser.add_argument("--load_dir")
    parser.add_argument("--ckpt_id")
    parser.add_argument("--save_interval", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args()


def main():
    args = arguments()
    torch.manual_seed(0)
    model = ModelWithLoss()
    model_engine, optimizer, _, _ = deepspeed.deepspeed_initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
    )
    dataset = SentenceDataset(args.train_file)
    sampler = DistributedSampler(dataset, shuffle=False)
    data_loader = DataLoader(dataset, batch_size=model_engine.train_micro_batch_size_per_gpu(), sampler=sampler)

    # load checkpoint
    step, client_sd = -1, {}
    if args.load_dir is not None:
        _, client_sd = model_engine.load_checkpoint(args.load_dir, args.ckpt_id)
        step = client_sd["step"]

    # advance data loader to ckpt step
    for step, batch in dataloader_to_step(data_loader, step + 1):
        # forward() method
        loss = model_engine(batch)

        # runs backpropagation
        model_engine.backward(loss)

        # weight update
        model_engine.step()

        if model_engine.global_rank == 0:
            print(f"step {step}: loss {loss.item():.9f}", flush=True)

        # save checkpoint
        if step % args.save_interval == 0:
            client_sd["step"] = step
            ckpt_id = loss.item()
            model_engine.save_checkpoint(args.save_dir, ckpt_id, client_sd=client_sd)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
