#include "checkpoint/model/state.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <iterator>

#include "base/error.hpp"

namespace tsr {

void check_name(std::string_view name, std::string_view what) {
    if (name.empty()) throw Error(Code::invalid_argument, fmt::format("{} is empty", what));
    if (name.size() > max_name_bytes) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} has {} bytes; at most {} are allowed", what, name.size(), max_name_bytes));
    }
    if (!is_utf8(name)) throw Error(Code::invalid_argument, fmt::format("{} is not UTF-8", what));
    if (std::any_of(name.begin(), name.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; })) {
        throw Error(Code::invalid_argument, fmt::format("{} contains a control character", what));
    }
}

std::string registered_name(std::string_view name) {
    std::string result;
    while (true) {
        const size_t dot = name.find('.');
        if (dot == std::string_view::npos) return result.append(name);
        const std::string_view part = name.substr(0, dot);
        if (part != "module" && part != "_orig_mod") result.append(name.substr(0, dot + 1));
        name.remove_prefix(dot + 1);
    }
}

std::optional<int> private_rank(std::string_view name) {
    if (!name.starts_with("rank/")) return std::nullopt;
    name.remove_prefix(5);
    const size_t slash = name.find('/');
    if (slash == std::string_view::npos || slash == 0 || slash + 1 == name.size()) return std::nullopt;
    const std::string_view digits = name.substr(0, slash);
    if (digits.size() > 1 && digits.front() == '0') return std::nullopt;
    int rank = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
    if (error != std::errc{} || end != digits.data() + digits.size() || rank < 0) return std::nullopt;
    return rank;
}

void State::insert(std::string_view name, StateTensor tensor) {
    const Reentry once = enter();
    check_name(name, "a tensor's name");
    std::string key = registered_name(name);
    if (key.empty()) {
        throw Error(
            Code::invalid_argument,
            fmt::format("the tensor name '{}' consists only of wrapper prefixes (module., _orig_mod.), which are "
                        "stripped",
                        name));
    }
    if (private_rank(key)) {
        throw Error(
            Code::invalid_argument,
            fmt::format("tensor '{}': names under rank/<r>/ are reserved for per-rank values; store its bytes as a "
                        "value, or give the tensor a layout",
                        key));
    }
    refuse_if_taken(key);
    note_device(tensor.device);
    tensors_.emplace_hint(tensors_.end(), std::move(key), std::move(tensor));  // names mostly come in order
    version_ = nullptr;
}

const State::Tensors::value_type& State::tensor(size_t index) const {
    if (index >= tensors_.size()) {
        throw Error(Code::invalid_argument,
                    fmt::format("tensor index {} is out of range: the state has {} tensors", index, tensors_.size()));
    }
    if (order_.size() != tensors_.size()) {  // none is ever taken out
        order_.clear();
        for (auto entry = tensors_.begin(); entry != tensors_.end(); ++entry) order_.push_back(entry);
    }
    return *order_[index];
}

std::shared_ptr<const void> State::tensors_version() const {
    if (!version_) version_ = std::make_shared<char>();
    return version_;
}

namespace {

// Throws unless the tensor lies where it says.
void check_device(std::string_view name, const Tensor& tensor) {
    if (tensor.device.type == DeviceType::cpu) return;
    DeviceApi& device = device_api(tensor.device);
    if (tensor.data == nullptr) return;  // without elements
    try {
        device.check_memory(tensor.data);
    } catch (const Error& error) {
        if (error.code() != Code::invalid_argument) throw;
        throw Error(Code::invalid_argument, fmt::format("tensor '{}' {}", registered_name(name), error.what()));
    }
}

}  // namespace

void State::note_device(Device device) {
    if (device.type == DeviceType::cpu) return;
    if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) devices_.push_back(device);
}

void State::set_stream(Device device, StreamHandle stream) {
    const Reentry once = enter();
    device_api(device).check_stream(stream);
    streams_[device.index] = stream;
}

void State::follow(CopyStreams& copies) const {
    for (const Device device : devices_) {
        const auto stream = streams_.find(device.index);
        copies.of(device)->follow(stream == streams_.end() ? nullptr : stream->second);
    }
}

std::shared_ptr<const TensorKind> State::shared_kind(TensorKind kind) {
    const auto make = [&] {
        kind.boxes = kind.layout ? kind.layout->boxes_of(kind.rank) : std::vector{Box::whole(kind.shape)};
        return std::make_shared<const TensorKind>(std::move(kind));
    };
    // Lists of boxes are slow to compare, and few tensors share one.
    if (kind.layout && kind.layout->is_explicit()) return make();
    size_t hash = static_cast<size_t>(kind.dtype);
    for (const int64_t size : kind.shape) hash = (hash ^ static_cast<size_t>(size)) * 0x9e3779b97f4a7c15;
    std::vector<std::shared_ptr<const TensorKind>>& alike = kinds_[hash];
    for (const auto& known : alike) {
        if (known->dtype == kind.dtype && known->shape == kind.shape && known->layout == kind.layout &&
            known->rank == kind.rank && known->own_rows == kind.own_rows) {
            return known;
        }
    }
    return alike.emplace_back(make());
}

void State::add_tensor(std::string_view name, const Tensor& tensor) {
    check_device(name, tensor);
    insert(name, {shared_kind({tensor.dtype, tensor.shape, {}, -1, {}, {}}), {tensor.data}, nullptr, tensor.device});
}

void State::add_shared(std::string_view name, const Tensor& tensor, std::shared_ptr<SharedCopy> copy) {
    if (tensor.device.type != DeviceType::cpu) {
        throw Error(Code::unsupported,
                    fmt::format("tensor '{}', which ranks of a host share, is not on the CPU", registered_name(name)));
    }
    Box rows = Box::whole(tensor.shape);
    if (tensor.shape.ndim() > 0) {
        const Rows own = own_rows(tensor.shape[0], *copy);
        rows.offsets[0] = own.begin;
        rows.sizes[0] = own.end - own.begin;
    }
    insert(name, {shared_kind({tensor.dtype, tensor.shape, {}, -1, rows, {}}), {tensor.data}, std::move(copy)});
}

std::vector<std::shared_ptr<SharedCopy>> State::shared_copies() const {
    std::vector<std::shared_ptr<SharedCopy>> copies;
    for (const auto& [name, tensor] : tensors_) {
        if (tensor.shared && std::find(copies.begin(), copies.end(), tensor.shared) == copies.end()) {
            copies.push_back(tensor.shared);
        }
    }
    return copies;
}

void State::add_sharded(std::string_view name, const Layout& layout, DType dtype, std::span<const Tensor> pieces,
                        int rank) {
    if (!is_known(dtype)) {
        throw Error(Code::invalid_argument,
                    fmt::format("tensor '{}' has the unknown dtype {}", name, static_cast<int>(dtype)));
    }
    check_shape(layout.shape(), dtype, fmt::format("tensor '{}'", name));
    StateTensor entry{shared_kind({dtype, layout.shape(), layout, rank, {}, {}}), {}, nullptr};
    const std::vector<Box>& boxes = entry.kind->boxes;
    if (boxes.size() != pieces.size()) {
        throw Error(Code::invalid_argument, fmt::format("tensor '{}': {} pieces, but the layout gives rank {} {} boxes",
                                                        name, pieces.size(), rank, boxes.size()));
    }
    entry.memory.reserve(pieces.size());
    for (size_t i = 0; i < pieces.size(); ++i) {
        if (pieces[i].dtype != dtype || pieces[i].shape != boxes[i].sizes) {
            throw Error(
                Code::invalid_argument,
                fmt::format("tensor '{}': piece {} is {} {}, but the layout gives rank {} the box {} of {}", name, i,
                            name_of(pieces[i].dtype), pieces[i].shape.str(), rank, boxes[i].str(), name_of(dtype)));
        }
        check_device(name, pieces[i]);
        if (i > 0 && pieces[i].device != entry.device) {
            throw Error(Code::unsupported, fmt::format("the pieces of tensor '{}' are on different devices", name));
        }
        entry.device = pieces[i].device;
        entry.memory.push_back(pieces[i].data);
    }
    insert(name, std::move(entry));
}

void State::distribute(const std::string& name, DType dtype, const Layout& layout, int rank) {
    const Reentry once = enter();
    const auto [at, is_new] = tensors_.try_emplace(name);
    StateTensor& tensor = at->second;
    const Box rows = is_new ? Box{} : tensor.kind->own_rows;
    if (layout.shape().product() == 0) {  // explicit layouts have no box for it
        tensor.kind = shared_kind({dtype, layout.shape(), {}, -1, rows, {}});
        tensor.memory.resize(1);
    } else {
        tensor.kind = shared_kind({dtype, layout.shape(), layout, rank, rows, {}});
    }
    version_ = nullptr;
}

void State::refuse_if_taken(const std::string& tensor) const {
    if (tensors_.contains(tensor) || values_.contains(tensor)) {
        throw Error(Code::invalid_argument, fmt::format("the state already has the name '{}'", tensor));
    }
}

void State::refuse_if_taken(const StateSource& source) const {
    const std::string begin = source.prefix() + ".";
    for (const auto& other : sources_) {
        const std::string other_begin = other->prefix() + ".";
        if (other_begin.starts_with(begin) || begin.starts_with(other_begin)) {
            throw Error(Code::invalid_argument,
                        fmt::format("the state already has values under the prefix '{}'", other->prefix()));
        }
    }
    const auto value = values_.lower_bound(begin);
    if (value != values_.end() && value->first.starts_with(begin)) {
        throw Error(Code::invalid_argument, fmt::format("the state already has the value '{}'", value->first));
    }
}

void State::add_source(std::shared_ptr<StateSource> source) {
    const Reentry once = enter();
    check_name(source->prefix(), "a prefix");
    refuse_if_taken(*source);
    sources_.push_back(std::move(source));
}

void State::add_all(State&& part) {
    const Reentry once = enter();
    for (const auto& [name, tensor] : part.tensors_) refuse_if_taken(name);
    for (const auto& source : part.sources_) refuse_if_taken(*source);
    sources_.reserve(sources_.size() + part.sources_.size());
    kept_.reserve(kept_.size() + part.kept_.size());
    barriers_.reserve(barriers_.size() + part.barriers_.size());
    gates_.reserve(gates_.size() + part.gates_.size());
    devices_.reserve(devices_.size() + part.devices_.size());
    // Nothing throws from here on.
    tensors_.merge(part.tensors_);
    same_.merge(part.same_);
    updates_.merge(part.updates_);
    for (const Device device : part.devices_) note_device(device);
    version_ = nullptr;
    part.version_ = nullptr;
    std::move(part.sources_.begin(), part.sources_.end(), std::back_inserter(sources_));
    std::move(part.kept_.begin(), part.kept_.end(), std::back_inserter(kept_));
    std::move(part.barriers_.begin(), part.barriers_.end(), std::back_inserter(barriers_));
    std::move(part.gates_.begin(), part.gates_.end(), std::back_inserter(gates_));
}

const StateSource* State::source_of(std::string_view name) const {
    for (const auto& source : sources_) {
        if (name.size() > source->prefix().size() && name.starts_with(source->prefix()) &&
            name[source->prefix().size()] == '.') {
            return source.get();
        }
    }
    return nullptr;
}

bool State::has_own(std::string_view name) const {
    const StateSource* source = source_of(name);
    return source != nullptr && !source->is_replicated();
}

void State::set_value(std::string_view name, Json value) {
    const Reentry once = enter();
    check_name(name, "a value's name");
    check_value(value, fmt::format("value '{}'", name));
    if (const StateSource* source = source_of(name)) {
        throw Error(Code::invalid_argument,
                    fmt::format("value '{}' belongs to the object added as '{}'", name, source->prefix()));
    }
    if (tensors_.contains(name)) {
        throw Error(Code::invalid_argument, fmt::format("'{}' is a tensor of the state", name));
    }
    values_.insert_or_assign(std::string(name), std::move(value));
}

Json State::value(std::string_view name) const {
    const Reentry once = enter();
    if (const auto found = values_.find(name); found != values_.end()) return found->second;
    if (const StateSource* source = source_of(name)) {
        const Values values = source->collect();
        if (const auto found = values.find(name); found != values.end()) return found->second;
    }
    throw Error(Code::not_found, fmt::format("the state has no value '{}'", name));
}

void State::set_metric(std::string_view name, double value) {
    const Reentry once = enter();
    check_name(name, "a metric's name");
    metrics_.insert_or_assign(std::string(name), double_value(value));
}

std::string State::told(const std::string& name, const Json& value) const {
    return same_.contains(name) ? fmt::format("value '{}' of {}\n", name, value.dump())
                                : fmt::format("value '{}'\n", name);
}

Values State::collect() const {
    const Reentry once = enter();
    Values all = values_;
    for (const auto& source : sources_) {
        for (auto& [name, value] : source->collect()) {
            check_name(name, "a value's name");
            check_value(value, fmt::format("value '{}'", name));
            if (!name.starts_with(source->prefix() + ".")) {
                throw Error(Code::internal,
                            fmt::format("the source '{}' returned the value '{}', which is not under its prefix",
                                        source->prefix(), name));
            }
            if (tensors_.contains(name)) {
                throw Error(Code::invalid_argument,
                            fmt::format("'{}' returned the value '{}', which is a tensor of the state",
                                        source->prefix(), name));
            }
            all.insert_or_assign(name, value);
        }
    }
    return all;
}

namespace {

Values under(const Values& values, const std::string& prefix) {
    const std::string begin = prefix + ".";
    Values found;
    for (auto it = values.lower_bound(begin); it != values.end() && it->first.starts_with(begin); ++it) {
        found.insert(*it);
    }
    return found;
}

}  // namespace

std::vector<std::string> State::prefixes() const {
    std::vector<std::string> all;
    for (const auto& source : sources_) {
        if (!source->has_tensors()) all.push_back(source->prefix());
    }
    return all;
}

void State::check(const Values& values, const std::set<std::string>& left_alone) const {
    const Reentry once = enter();
    for (const auto& gate : gates_) gate();
    for (const auto& source : sources_) {
        if (!left_alone.contains(source->prefix())) source->check(under(values, source->prefix()));
    }
}

void State::apply(const Values& values, const std::set<std::string>& left_alone) {
    const Reentry once = enter();
    for (const auto& source : sources_) {
        if (!left_alone.contains(source->prefix())) source->apply(under(values, source->prefix()));
    }
    for (const auto& [name, value] : values) {
        if (source_of(name) == nullptr) values_.insert_or_assign(name, value);
    }
}

}  // namespace tsr
