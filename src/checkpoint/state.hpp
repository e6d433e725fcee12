// What a checkpoint saves and loads in place: named tensors (whole, or this rank's pieces of a layout), named typed
// values, metrics, and sources that own further values. It borrows the tensors' memory and copies none of it. Owned by
// one thread; a save or load uses it only while it is called.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/state_source.hpp"
#include "checkpoint/value.hpp"
#include "tensor/layout.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr {

inline constexpr size_t max_name_bytes = 1024;

struct StateTensor {
    DType dtype = DType::f32;
    Dims shape;                    // of the whole tensor
    std::optional<Layout> layout;  // none: every rank holds it whole
    std::vector<Box> boxes;        // what this rank holds,
    std::vector<Tensor> pieces;    // and where: contiguous, as large as the boxes
    int rank = -1;                 // that the boxes are of; -1 without layout
};

class State {
   public:
    using Tensors = std::map<std::string, StateTensor, std::less<>>;

    void add_tensor(std::string_view name, const Tensor& tensor);
    void add_sharded(std::string_view name, const Layout& layout, DType dtype, std::span<const Tensor> pieces,
                     int rank);
    void add_source(std::shared_ptr<StateSource> source);
    // The tensors and sources of `part`, and what it keeps alive: all of them, or none if one is refused.
    void add_all(State&& part);
    void set_value(std::string_view name, Json value);
    [[nodiscard]] Json value(std::string_view name) const;  // NOT_FOUND
    void set_metric(std::string_view name, double value);
    // Keeps something alive as long as the state, such as the owner of a tensor's memory.
    void keep(std::shared_ptr<const void> owner) { kept_.push_back(std::move(owner)); }

    // Of a writer of some of the tensors' memory, such as an optimizer: a save may copy that memory late.
    void add_barrier(std::shared_ptr<WriteBarrier> barrier) { barriers_.push_back(std::move(barrier)); }

    [[nodiscard]] const std::vector<std::shared_ptr<WriteBarrier>>& barriers() const { return barriers_; }
    [[nodiscard]] const Tensors& tensors() const { return tensors_; }
    [[nodiscard]] const Values& metrics() const { return metrics_; }
    // All values, those of the sources as they are now.
    [[nodiscard]] Values collect() const;
    // Throws if a source refuses its part of the values of a load.
    void check(const Values& values) const;
    // Takes values of a load: every source gets those under its prefix, the others are set.
    void apply(const Values& values);

   private:
    void insert(std::string_view name, StateTensor tensor);
    void refuse_if_taken(const std::string& tensor) const;
    void refuse_if_taken(const StateSource& source) const;
    [[nodiscard]] const StateSource* source_of(std::string_view name) const;

    Tensors tensors_;
    Values values_;
    Values metrics_;
    std::vector<std::shared_ptr<StateSource>> sources_;
    std::vector<std::shared_ptr<const void>> kept_;
    std::vector<std::shared_ptr<WriteBarrier>> barriers_;
};

// Throws INVALID_ARGUMENT unless `name` is UTF-8 of 1 to max_name_bytes bytes without control characters.
void check_name(std::string_view name, std::string_view what);
// Without "module." and "_orig_mod." parts, which wrappers put before parameter names.
[[nodiscard]] std::string registered_name(std::string_view name);
// The rank r of a name "rank/<r>/...", whose value belongs to that rank alone.
[[nodiscard]] std::optional<int> private_rank(std::string_view name);

}  // namespace tsr
