#include "checkpoint/formats/deepspeed/parts.hpp"

#include <fmt/core.h>

#include <tuple>
#include <utility>

#include "base/error.hpp"

namespace tsr {

namespace {

using pickle::Kind;
using pickle::no_ref;
using pickle::Ref;

constexpr int64_t piece_bytes = sizeof(SavedPiece) + sizeof(TorchPiece);
constexpr int64_t tensor_bytes = sizeof(SavedTensor) + sizeof(TorchContents::Tensor) + 256;

}  // namespace

DeepSpeedParts::DeepSpeedParts(FileSystem& files, const std::string& directory)
    : archives(files, directory), objects(manifest, tensors) {
    for (int file = 0; file < archives.count(); ++file) objects.allow(archives.archive(file));
}

void DeepSpeedParts::read_module() {
    model = archives.members(0, archives.need(0, "module"));
    if (const Ref shared = archives.find(0, "shared_params"); shared != no_ref) {
        for (const auto& [name, target] : archives.members(0, shared)) {
            aliases.emplace(name, archives.tree(0).as_text(target));
        }
    }
    std::map<std::tuple<const ZipEntry*, int64_t, std::string>, std::string_view> known;
    for (const auto& [name, node] : model) {
        if (aliases.contains(name)) continue;
        const auto stored = archives.find_tensor(0, node);
        if (!stored || stored->entry == nullptr || stored->shape.product() == 0) continue;
        const auto [first, is_new] =
            known.try_emplace({stored->entry, stored->first, stored->shape.str() + stored->strides.str()}, name);
        if (!is_new) aliases.emplace(name, first->second);
    }
}

std::set<std::string_view> DeepSpeedParts::buffer_names() const {
    std::set<std::string_view> names;
    for (const Ref one : archives.list(0, archives.need(0, "buffer_names"))) {
        names.insert(archives.tree(0).as_text(one));
    }
    return names;
}

std::vector<std::vector<DeepSpeedParts::Parameter>> DeepSpeedParts::parameters() const {
    std::vector<std::vector<Parameter>> groups;
    std::set<std::string_view> names;
    for (const Ref group : archives.list(0, archives.need(0, "param_shapes"))) {
        std::vector<Parameter>& found = groups.emplace_back();
        for (const auto& [name, shape] : archives.members(0, group)) {
            if (!names.insert(name).second) archives.refuse(0, fmt::format("two parameters are called '{}'", name));
            found.push_back({std::string(name), shape_of(name, shape)});
        }
    }
    return groups;
}

Dims DeepSpeedParts::shape_of(std::string_view name, Ref node) const {
    const Dims shape = dims_of(archives.tree(0), node);
    try {
        check_shape(shape, DType::f32, fmt::format("parameter '{}'", name));
    } catch (const Error& error) {
        archives.refuse(0, error.what());
    }
    return shape;
}

void DeepSpeedParts::put(const std::string& name, SavedTensor saved, TorchContents::Tensor tensor) {
    objects.take_name(archives.archive(0), name);
    objects.spend(archives.archive(0), tensor_bytes + 2 * static_cast<int64_t>(name.size()) +
                                           piece_bytes * static_cast<int64_t>(tensor.pieces.size()));
    saved.dtype = tensor.dtype;
    if (!tensor.pieces.empty()) tensors[name] = std::move(tensor);
    manifest.tensors.emplace(name, std::make_shared<const SavedTensor>(std::move(saved)));
}

void DeepSpeedParts::put_fragments(const std::string& name, const Dims& shape, const std::vector<Fragment>& fragments,
                                   NodeOf node_of) {
    SavedTensor saved;
    saved.shape = shape;
    TorchContents::Tensor tensor;
    bool is_first = true;
    for (const Fragment& fragment : fragments) {
        const int file = fragment.partition->file;
        const Ref node = node_of(fragment);
        const StoredTensor stored = archives.flat_tensor(file, node);
        if (fragment.count > stored.shape[0] - fragment.begin) {
            archives.refuse(file, fmt::format("'{}' needs elements {} to {} of a partition of {}", name, fragment.begin,
                                              fragment.begin + fragment.count, stored.shape[0]));
        }
        if (!is_first && tensor.dtype != stored.dtype) {
            archives.refuse(file, fmt::format("'{}' is {} here, but {} in another rank's file", name,
                                              name_of(stored.dtype), name_of(tensor.dtype)));
        }
        is_first = false;
        tensor.dtype = stored.dtype;
        int64_t at = fragment.begin;
        for (const Box& box : boxes_of_range(shape, {fragment.first, fragment.first + fragment.count})) {
            TorchPiece piece{box, {file, 0, archives.size_bytes(file)}, node};
            piece.first = at;
            at += box.numel();
            saved.pieces.push_back({box, file});
            tensor.pieces.push_back(std::move(piece));
        }
    }
    put(name, std::move(saved), std::move(tensor));
}

void DeepSpeedParts::put_parameter(const Parameter& parameter, const std::vector<Fragment>& fragments) {
    put_fragments("model." + parameter.name, parameter.shape, fragments,
                  [](const Fragment& fragment) { return fragment.partition->master; });
    if (fragments.empty()) return;
    const Partition& first = *fragments[0].partition;
    for (const auto& [key, node] : first.state) {
        const std::string name = fmt::format("optim.state.{}.{}", parameter.name, key);
        if (put_scalar(name, first.file, node)) continue;
        const auto of_fragment = [&, &key = key](const Fragment& fragment) {
            for (const auto& [other, found] : fragment.partition->state) {
                if (other == key) return found;
            }
            archives.refuse(fragment.partition->file,
                            fmt::format("its optimizer has no '{}', as another rank's has", key));
        };
        if (const auto why = why_not_flat(fragments, of_fragment)) {
            objects.take_name(archives.archive(0), name);
            manifest.unreadable.emplace(name, *why);
        } else {
            put_fragments(name, parameter.shape, fragments, of_fragment);
        }
    }
}

// Optimizers of other kinds may keep what has other sizes than the parameters.
std::optional<std::string> DeepSpeedParts::why_not_flat(const std::vector<Fragment>& fragments, NodeOf node_of) const {
    for (const Fragment& fragment : fragments) {
        const int file = fragment.partition->file;
        const Ref node = node_of(fragment);
        const auto stored = archives.find_tensor(file, node);
        if (!stored) return fmt::format("{} is not supported", archives.tree(file).name(node));
        const Dims& shape = stored->shape;
        if (shape.ndim() == 1 && shape[0] >= fragment.partition->count) continue;
        return fmt::format("it has the shape {} for a partition of {} elements", shape.str(),
                           fragment.partition->count);
    }
    return std::nullopt;
}

bool DeepSpeedParts::put_scalar(const std::string& name, int file, Ref node) {
    TorchPiece piece{Box::whole(Dims{}), {file, 0, archives.size_bytes(file)}, node};
    TorchContents::Tensor tensor;
    if (const auto stored = archives.find_tensor(file, node)) {
        if (stored->shape.ndim() != 0) return false;
        tensor.dtype = stored->dtype;
    } else if (archives.tree(file).is(node, Kind::integer)) {
        piece.number = static_cast<float>(archives.tree(file).as_int(node));
    } else if (archives.tree(file).is(node, Kind::real)) {
        piece.number = static_cast<float>(archives.tree(file).as_real(node));
    } else {
        return false;
    }
    SavedTensor saved;
    saved.pieces.push_back({piece.box, file});
    tensor.pieces.push_back(std::move(piece));
    put(name, std::move(saved), std::move(tensor));
    return true;
}

void DeepSpeedParts::append_end(std::vector<int64_t>& ends, const Partition& partition) const {
    int64_t end = 0;
    if (__builtin_add_overflow(ends.empty() ? 0 : ends.back(), partition.count, &end)) {
        archives.refuse(partition.file, "the total size of its partitions exceeds 2^63 elements");
    }
    ends.push_back(end);
}

void DeepSpeedParts::add_module() {
    for (const auto& [key, node] : model) {
        const std::string name = fmt::format("model.{}", key);
        if (!manifest.tensors.contains(name) && !aliases.contains(key)) objects.add(source(0), name, node);
    }
}

}  // namespace tsr
