// Data-parallel training: every rank holds the whole model, gradients are averaged in buckets while the trainer's
// backward pass goes on. The trainer writes gradients into views of the buckets and says which are ready, in any order;
// buckets are launched strictly in their own order, so that all ranks issue the same collectives.
//
// A step:   idle --ready--> reducing --wait--> idle        a collective failed: failed, for good
//
// Owned by one thread; the collectives run on the communicator's.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "parallel/ddp/bucket_plan.hpp"

namespace tsr {

struct NamedTensor {
    std::string name;
    Tensor tensor;
};

struct DdpOptions {
    size_t bucket_bytes = size_t{25} << 20;
    size_t first_bucket_bytes = size_t{1} << 20;
    ReduceOp op = ReduceOp::avg;
};

class Ddp {
   public:
    // Collective: checks that all ranks register the same and gives every rank the values of rank 0. The tensors' memory
    // must outlive this object.
    Ddp(std::shared_ptr<Communicator> comm, std::vector<NamedTensor> params, const DdpOptions& options);
    ~Ddp();
    Ddp(const Ddp&) = delete;
    Ddp& operator=(const Ddp&) = delete;

    [[nodiscard]] const std::vector<NamedTensor>& params() const {
        return params_;
    }  // names without wrappers' prefixes
    [[nodiscard]] const NamedTensor& param(size_t index) const;
    [[nodiscard]] const Tensor& grad(size_t index) const;
    [[nodiscard]] const std::vector<Bucket>& buckets() const { return buckets_; }

    void ready(size_t index);
    void ready_all();
    void wait();
    void zero_grad();

    // Throws INVALID_STATE if gradients are being reduced or their reduction failed; `what` says what cannot be done.
    void check_idle(const char* what) const;

   private:
    void lay_out_gradients();
    void broadcast_values();
    void clear_gradients();
    void launch_full_buckets();
    [[nodiscard]] Tensor bucket_tensor(size_t bucket) const;
    [[nodiscard]] Error failure() const;

    std::shared_ptr<Communicator> comm_;
    std::vector<NamedTensor> params_;
    DdpOptions options_;
    std::vector<Bucket> buckets_;
    std::vector<size_t> bucket_offsets_;  // in buffer_
    std::vector<size_t> bucket_of_;       // of each parameter
    std::shared_ptr<Buffer> buffer_;      // all buckets
    std::vector<Tensor> grads_;

    std::vector<char> ready_;  // of each parameter, this step
    size_t ready_count_ = 0;
    std::vector<size_t> missing_;  // of each bucket: parameters not ready yet
    size_t launched_ = 0;          // buckets, this step
    std::vector<WorkPtr> works_;   // of the launched buckets; nullptr for an empty one
    std::optional<Error> failed_;
};

// The name without leading "module." and "_orig_mod.", however many.
[[nodiscard]] std::string without_wrappers(std::string name);

}  // namespace tsr
