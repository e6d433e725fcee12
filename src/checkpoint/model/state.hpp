// What a checkpoint saves and loads in place: named tensors (whole, or this rank's pieces of a layout), named typed
// values, metrics, and sources that own further values. Borrows the tensors' memory, of the host or of devices, and never
// copies it. Not thread-safe; a save or load uses it only during the call. A source must not call the state that it belongs to
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
#include "device/copy_streams.hpp"
#include "tensor/layout.hpp"
#include "tensor/shared_copy.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr {

inline constexpr size_t max_name_bytes = 1024;

// What tensors have in common that differ only in name and memory. A model has few kinds, however many tensors.
struct TensorKind {
    DType dtype = DType::f32;
    Dims shape;                    // of the whole tensor
    std::optional<Layout> layout;  // nullopt: every rank holds the whole tensor
    int rank = -1;                 // the rank whose boxes these are; -1 without a layout
    Box own_rows;                  // in memory shared by ranks of a host: the rows that this rank loads
    std::vector<Box> boxes;        // what this rank holds; follows from the members above
};

struct StateTensor {
    std::shared_ptr<const TensorKind> kind;
    std::vector<std::byte*> memory;      // of each box, contiguous
    std::shared_ptr<SharedCopy> shared;  // the shared memory it lies in, if ranks of a host share it
    Device device{};                     // of the memory

    [[nodiscard]] Tensor piece(size_t box) const { return {memory[box], kind->boxes[box].sizes, kind->dtype, device}; }
};

class State {
   public:
    using Tensors = std::map<std::string, StateTensor, std::less<>>;

    State() = default;
    State(State&&) = default;  // no copies: they would change names independently under the same version
    State& operator=(State&&) = default;

    void add_tensor(std::string_view name, const Tensor& tensor);
    // Every rank holds the whole tensor; the ranks of a host share its memory.
    void add_shared(std::string_view name, const Tensor& tensor, std::shared_ptr<SharedCopy> copy);
    void add_sharded(std::string_view name, const Layout& layout, DType dtype, std::span<const Tensor> pieces,
                     int rank);
    void add_source(std::shared_ptr<StateSource> source);
    // Adds the tensors and sources of `part` and what it keeps alive: all of them, or none if it throws.
    void add_all(State&& part);
    void set_value(std::string_view name, Json value);
    [[nodiscard]] Json value(std::string_view name) const;  // NOT_FOUND
    void set_metric(std::string_view name, double value);
    // Names the value that counts an optimizer's updates. After require_same_updates(), which is for ranks that hold
    // different parts of a model, a save fails unless these values are the same on all ranks.
    void count_updates(std::string name) { updates_.insert(std::move(name)); }
    void require_same_updates() { same_.merge(updates_); }
    // Gives a tensor another layout, which gives this rank the boxes that it has already. A tensor that this rank lacks
    // is added: the layout gives it no boxes.
    void distribute(const std::string& name, DType dtype, const Layout& layout, int rank);
    // One line that must be the same on all ranks of a save.
    [[nodiscard]] std::string told(const std::string& name, const Json& value) const;
    // Keeps something alive as long as the state, such as the owner of a tensor's memory.
    void keep(std::shared_ptr<const void> owner) { kept_.push_back(std::move(owner)); }

    // The barrier of a writer of some of the tensors' memory, such as an optimizer: a save may copy that memory late.
    void add_barrier(std::shared_ptr<WriteBarrier> barrier) { barriers_.push_back(std::move(barrier)); }

    // The stream on which the program makes and uses the tensors of a device; else it is the device's default stream.
    void set_stream(Device device, StreamHandle stream);
    // The copies of each device that has a tensor wait for what the program's stream there has now.
    void follow(CopyStreams& copies) const;
    [[nodiscard]] bool has_devices() const { return !devices_.empty(); }

    // Called before a load writes anything; throws if the tensors must not be written now.
    void add_gate(std::function<void()> gate) { gates_.push_back(std::move(gate)); }

    [[nodiscard]] const std::vector<std::shared_ptr<WriteBarrier>>& barriers() const { return barriers_; }
    [[nodiscard]] const Tensors& tensors() const { return tensors_; }
    // By index in name order.
    [[nodiscard]] const Tensors::value_type& tensor(size_t index) const;
    // The shared copies that its tensors lie in, each once, in the order of the tensors.
    [[nodiscard]] std::vector<std::shared_ptr<SharedCopy>> shared_copies() const;
    // Changes when the tensors change. While a version is kept, no other set of tensors has it.
    [[nodiscard]] std::shared_ptr<const void> tensors_version() const;
    [[nodiscard]] Values take_metrics() { return std::exchange(metrics_, {}); }  // for the save that begins
    // Whether a value of this name is of a source whose values are the ranks' own.
    [[nodiscard]] bool has_own(std::string_view name) const;
    // Whether it has no tensors, sources and metrics.
    [[nodiscard]] bool has_values_alone() const { return tensors_.empty() && sources_.empty() && metrics_.empty(); }
    // All values, including the current ones of the sources.
    [[nodiscard]] Values collect() const;
    // The prefixes of the sources that a load of other names may leave alone.
    [[nodiscard]] std::vector<std::string> prefixes() const;
    // Throws what a gate throws, or if a source refuses its part of the values of a load. Sources with the prefixes
    // `left_alone` are skipped.
    void check(const Values& values, const std::set<std::string>& left_alone) const;
    // Applies the values of a load, one for each of collect(): every source that is not left alone gets those under its
    // prefix, the others are set.
    void apply(const Values& values, const std::set<std::string>& left_alone);

   private:
    // Creates the kind or finds an equal one; `kind` has no boxes yet.
    [[nodiscard]] std::shared_ptr<const TensorKind> shared_kind(TensorKind kind);
    void insert(std::string_view name, StateTensor tensor);
    void note_device(Device device);
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
    std::set<std::string, std::less<>> updates_;
    std::vector<std::shared_ptr<StateSource>> sources_;
    std::vector<std::shared_ptr<const void>> kept_;
    std::vector<std::shared_ptr<WriteBarrier>> barriers_;
    std::vector<std::function<void()>> gates_;
    std::vector<Device> devices_;          // of the tensors that are not on the CPU, each once
    std::map<int, StreamHandle> streams_;  // that were set, by the devices' numbers
};

// Throws INVALID_ARGUMENT unless `name` is UTF-8 of 1 to max_name_bytes bytes without control characters.
void check_name(std::string_view name, std::string_view what);
// The name without "module." and "_orig_mod." parts, which wrappers put before parameter names.
[[nodiscard]] std::string registered_name(std::string_view name);
// The rank r of a name "rank/<r>/...", whose value belongs only to that rank.
[[nodiscard]] std::optional<int> private_rank(std::string_view name);

}  // namespace tsr
