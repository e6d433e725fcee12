// Definitions of the opaque handles of types.h. Magic words are ASCII of the type's name. The objects are only declared
// here; code that uses one includes its header.
#pragma once

#include "guard.hpp"

namespace tsr {
class Buffer;
class Checkpoint;
class Communicator;
class Ddp;
class Engine;
class Fsdp;
class GradScaler;
class Layout;
class LossScale;
class LrSchedule;
class Optimizer;
class Plan;
class Sampler;
class Saver;
class State;
class Storage;
class Store;
class StoreServer;
class TensorParallel;
class Turn;
class Work;
namespace metrics {
class Metric;
}
namespace pipeline {
class Pipeline;
}
namespace capi {
struct MeshObject;
}
}  // namespace tsr

// A store opens its own connections in a child. A communicator refuses the call itself, naming itself and its rank.
struct tsr_store : tsr::capi::Handle<tsr::Store, 0x545352'53544f5245, tsr::capi::InChild::left_to_object> {};
struct tsr_store_server : tsr::capi::Handle<tsr::StoreServer, 0x545352'53525652> {};
struct tsr_comm : tsr::capi::Handle<tsr::Communicator, 0x545352'434f4d4d, tsr::capi::InChild::left_to_object> {};
struct tsr_work : tsr::capi::Handle<tsr::Work, 0x545352'574f524b> {};
struct tsr_plan : tsr::capi::Handle<tsr::Plan, 0x545352'504c414e> {};
struct tsr_turn : tsr::capi::Handle<tsr::Turn, 0x545352'5455524e> {};
struct tsr_buffer : tsr::capi::Handle<tsr::Buffer, 0x545352'425546> {};
struct tsr_layout : tsr::capi::Handle<tsr::Layout, 0x545352'4c41594f> {};
struct tsr_optimizer : tsr::capi::Handle<tsr::Optimizer, 0x545352'4f5054494d> {};
struct tsr_grad_scaler : tsr::capi::Handle<tsr::GradScaler, 0x545352'5343414c> {};
struct tsr_loss_scale : tsr::capi::Handle<tsr::LossScale, 0x545352'4c5343414c> {};
struct tsr_lr_schedule : tsr::capi::Handle<tsr::LrSchedule, 0x545352'4c525343> {};
struct tsr_sampler : tsr::capi::Handle<tsr::Sampler, 0x545352'53414d504c> {};
struct tsr_metric : tsr::capi::Handle<tsr::metrics::Metric, 0x545352'4d45545249> {};
struct tsr_ddp : tsr::capi::Handle<tsr::Ddp, 0x545352'444450> {};
struct tsr_fsdp : tsr::capi::Handle<tsr::Fsdp, 0x545352'46534450> {};
struct tsr_tp : tsr::capi::Handle<tsr::TensorParallel, 0x545352'5450> {};
struct tsr_pipeline : tsr::capi::Handle<tsr::pipeline::Pipeline, 0x545352'50495045> {};
struct tsr_engine : tsr::capi::Handle<tsr::Engine, 0x545352'454e47494e> {};
struct tsr_state : tsr::capi::Handle<tsr::State, 0x545352'5354415445> {};
struct tsr_saver : tsr::capi::Handle<tsr::Saver, 0x545352'5341564552> {};
struct tsr_checkpoint : tsr::capi::Handle<const tsr::Checkpoint, 0x545352'43484543> {};
struct tsr_storage : tsr::capi::Handle<tsr::Storage, 0x545352'53544f52> {};
struct tsr_mesh : tsr::capi::Handle<tsr::capi::MeshObject, 0x545352'4d455348> {};
