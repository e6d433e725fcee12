// What a checkpoint saves and loads in place: named tensors (whole, or this rank's pieces of a layout), named typed
// values, metrics, and sources that own further values. It borrows the tensors' memory and copies none of it. Owned by
// one thread; a save or load uses it only while it is called. What a source calls on the state that it serves is refused
// (INVALID_STATE).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/reentry.hpp"
#include "checkpoint/model/state_source.hpp"
#include "checkpoint/model/value.hpp"
#include "tensor/layout.hpp"
#include "tensor/shared_copy.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr {

inline constexpr size_t max_name_bytes = 1024;

// What tensors have in common that differ in name and memory alone. A model has few kinds, however many tensors.
struct TensorKind {
    DType dtype = DType::f32;
    Dims shape;                    // of the whole tensor
    std::optional<Layout> layout;  // none: every rank holds it whole
    int rank = -1;                 // that the boxes are of; -1 without layout
    Box own_rows;                  // of memory that ranks of a host share: a load reads these rows here
    std::vector<Box> boxes;        // what this rank holds; follows from the others
};

struct StateTensor {
    std::shared_ptr<const TensorKind> kind;
    std::vector<std::byte*> memory;      // of each box, contiguous
    std::shared_ptr<SharedCopy> shared;  // that it lies in, if ranks of a host share it

    [[nodiscard]] Tensor piece(size_t box) const { return {memory[box], kind->boxes[box].sizes, kind->dtype, {}}; }
};

class State {
   public:
    using Tensors = std::map<std::string, StateTensor, std::less<>>;

    State() = default;
    State(State&&) = default;  // no copies: they would have names of their own under the same version
    State& operator=(State&&) = default;

    void add_tensor(std::string_view name, const Tensor& tensor);
    // Every rank holds it whole, those of a host in one memory.
    void add_shared(std::string_view name, const Tensor& tensor, std::shared_ptr<SharedCopy> copy);
    void add_sharded(std::string_view name, const Layout& layout, DType dtype, std::span<const Tensor> pieces,
                     int rank);
    void add_source(std::shared_ptr<StateSource> source);
    // The tensors and sources of `part`, and what it keeps alive: all of them, or none if one is refused.
    void add_all(State&& part);
    void set_value(std::string_view name, Json value);
    [[nodiscard]] Json value(std::string_view name) const;  // NOT_FOUND
    void set_metric(std::string_view name, double value);
    // A value that is the same on all ranks, or a save is refused: such as how often shards were updated.
    void require_same(std::string name) { same_.insert(std::move(name)); }
    // What a value is to the ranks of a save, a line: those of all ranks are the same.
    [[nodiscard]] std::string told(const std::string& name, const Json& value) const;
    // Keeps something alive as long as the state, such as the owner of a tensor's memory.
    void keep(std::shared_ptr<const void> owner) { kept_.push_back(std::move(owner)); }

    // Of a writer of some of the tensors' memory, such as an optimizer: a save may copy that memory late.
    void add_barrier(std::shared_ptr<WriteBarrier> barrier) { barriers_.push_back(std::move(barrier)); }

    // Called before a load writes anything; throws if the tensors must not be written now.
    void add_gate(std::function<void()> gate) { gates_.push_back(std::move(gate)); }

    [[nodiscard]] const std::vector<std::shared_ptr<WriteBarrier>>& barriers() const { return barriers_; }
    [[nodiscard]] const Tensors& tensors() const { return tensors_; }
    // In the order of their names.
    [[nodiscard]] const Tensors::value_type& tensor(size_t index) const;
    // Those that its tensors lie in, each once, in the order of the tensors.
    [[nodiscard]] std::vector<std::shared_ptr<SharedCopy>> shared_copies() const;
    // The same as long as the tensors are, and, while it is kept, that of no other ones.
    [[nodiscard]] std::shared_ptr<const void> tensors_version() const;
    [[nodiscard]] Values take_metrics() { return std::exchange(metrics_, {}); }  // for the save that begins
    // Whether it has no tensors, sources and metrics.
    [[nodiscard]] bool has_values_alone() const { return tensors_.empty() && sources_.empty() && metrics_.empty(); }
    // All values, those of the sources as they are now.
    [[nodiscard]] Values collect() const;
    // Of its sources that a load of other names may leave alone.
    [[nodiscard]] std::vector<std::string> prefixes() const;
    // Throws what a gate does, or if a source refuses its part of the values of a load. Sources of these prefixes are not
    // asked.
    void check(const Values& values, const std::set<std::string>& left_alone) const;
    // Takes values of a load, one for each of collect(): every source but those that are left alone gets what is under its
    // prefix, the others are set.
    void apply(const Values& values, const std::set<std::string>& left_alone);

   private:
    // Makes it, or finds the one that is there; `kind` has no boxes yet.
    [[nodiscard]] std::shared_ptr<const TensorKind> shared_kind(TensorKind kind);
    void insert(std::string_view name, StateTensor tensor);
    void refuse_if_taken(const std::string& tensor) const;
    void refuse_if_taken(const StateSource& source) const;
    [[nodiscard]] const StateSource* source_of(std::string_view name) const;
    [[nodiscard]] Reentry enter() const { return {this, "the state", ""}; }

    Tensors tensors_;
    std::unordered_map<size_t, std::vector<std::shared_ptr<const TensorKind>>> kinds_;  // of regular tensors, by hash
    mutable std::vector<Tensors::const_iterator> order_;                                // made when it is asked for
    mutable std::shared_ptr<const void> version_;                                       // made when it is asked for
    Values values_;
    Values metrics_;
    std::set<std::string, std::less<>> same_;
    std::vector<std::shared_ptr<StateSource>> sources_;
    std::vector<std::shared_ptr<const void>> kept_;
    std::vector<std::shared_ptr<WriteBarrier>> barriers_;
    std::vector<std::function<void()>> gates_;
};

// Throws INVALID_ARGUMENT unless `name` is UTF-8 of 1 to max_name_bytes bytes without control characters.
void check_name(std::string_view name, std::string_view what);
// Without "module." and "_orig_mod." parts, which wrappers put before parameter names.
[[nodiscard]] std::string registered_name(std::string_view name);
// The rank r of a name "rank/<r>/...", whose value belongs to that rank alone.
[[nodiscard]] std::optional<int> private_rank(std::string_view name);

}  // namespace tsr
