"""PyTorch's pipeline stages, under PyTorch's module name."""

from torch.distributed.pipelining.stage import PipelineStage, PipelineStageInfo, build_stage

__all__ = ["PipelineStage", "PipelineStageInfo", "build_stage"]
