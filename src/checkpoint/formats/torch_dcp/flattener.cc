#include "checkpoint/formats/torch_dcp/flattener.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "base/error.hpp"
#include "checkpoint/model/state.hpp"
#include "checkpoint/model/value.hpp"

namespace tsr {

using pickle::Kind;
using pickle::Ref;
using pickle::Tree;

int64_t budget_of(const Tree& tree) { return static_cast<int64_t>(tree.size_bytes()) * value_bytes_per_byte; }

std::string without_place(const Error& error, const std::string& place) {
    std::string_view why = error.what();
    if (why.starts_with(place + ": ")) why.remove_prefix(place.size() + 2);
    return std::string(why);
}

Json checked_value_of(const Tree& tree, Ref node, int64_t& budget) {
    Json value = value_of(tree, node, budget);
    try {
        check_value(value, "the object");
    } catch (const Error& error) {
        throw Error(Code::unsupported, fmt::format("{}: {}", tree.what(), error.what()));
    }
    return value;
}

// One object's way into names.
class Flattener::Walk {
   public:
    Walk(Flattener& into, const Source& source)
        : archive_(*source.archive), tree_(source.archive->tree()), source_(source), into_(into) {}

    void add(const std::string& name, Ref node, int depth) {
        Parts parts;
        const std::string why = TorchArchive::is_tensor(tree_, node) ? "" : take_apart(name, node, depth, parts);
        if (!why.empty() && depth == 0) throw Error(Code::unsupported, fmt::format("{}: {}", tree_.what(), why));
        if (!why.empty() || parts.empty()) return add_leaf(name, node, why);
        for (const auto& [part_name, part] : parts) add(part_name, part, depth + 1);
    }

   private:
    static constexpr int max_names_depth = 64;

    // Whether it is taken apart: dicts always, lists and tuples depending on their contents.
    bool has_parts(Ref node, int depth) {
        if (--into_.budget_ < 0 || depth > max_names_depth) return false;
        if (TorchArchive::is_tensor(tree_, node) || tree_.is(node, Kind::dict)) return true;
        if (!tree_.is(node, Kind::list) && !tree_.is(node, Kind::tuple)) return false;
        const auto items = tree_.items(node);
        return std::any_of(items.begin(), items.end(), [&](Ref item) { return has_parts(item, depth + 1); });
    }

    using Parts = std::vector<std::pair<std::string, Ref>>;

    // Memory taken, without the names.
    static constexpr int64_t node_bytes = sizeof(std::string) + 48;
    static constexpr int64_t name_bytes = node_bytes + sizeof(Parts::value_type);
    static constexpr int64_t value_bytes = node_bytes + sizeof(Json);
    static constexpr int64_t tensor_bytes =
        2 * node_bytes + sizeof(SavedTensor) + sizeof(SavedPiece) + sizeof(TorchContents::Tensor) + sizeof(TorchPiece);

    // Adds the children to `parts` if each can have its own name; otherwise returns the reason.
    std::string take_apart(const std::string& name, Ref node, int depth, Parts& parts) {
        const std::string begin = name.empty() ? "" : name + ".";
        const auto put = [&](const std::string& key, Ref part) {
            // A key may be long, and shared by many.
            spend(name_bytes + 2 * static_cast<int64_t>(begin.size() + key.size()));
            parts.emplace_back(begin + key, part);
        };
        if (tree_.is(node, Kind::dict)) {
            const auto items = tree_.items(node);
            for (size_t i = 0; i < items.size(); i += 2) {
                const auto key = key_of(items[i]);
                if (!key) return fmt::format("a dict has {} as a key", tree_.name(items[i]));
                put(*key, items[i + 1]);
            }
        } else if ((tree_.is(node, Kind::list) || tree_.is(node, Kind::tuple)) && has_parts(node, depth)) {
            for (const Ref item : tree_.items(node)) put(std::to_string(parts.size()), item);
        }
        if (!parts.empty() && depth >= max_names_depth) return "it is nested too deeply";
        for (const auto& [part, item] : parts) {
            try {
                check_name(part, "a name");
            } catch (const Error& error) {
                return error.what();
            }
            if (into_.names_.contains(part)) return fmt::format("two objects have the name '{}'", part);
        }
        for (const auto& [part, item] : parts) {
            if (!into_.names_.insert(part).second) return fmt::format("two objects have the name '{}'", part);
        }
        return "";
    }

    void spend(int64_t bytes) { into_.spend(archive_, bytes); }

    std::optional<std::string> key_of(Ref key) const {
        if (tree_.is(key, Kind::text)) return std::string(tree_.as_text(key));
        if (tree_.is(key, Kind::integer)) return std::to_string(tree_.as_int(key));
        if (tree_.is(key, Kind::boolean)) return tree_.as_bool(key) ? "True" : "False";
        if (tree_.is(key, Kind::none)) return "None";
        return std::nullopt;
    }

    // `why` is the reason if it should have been taken apart but could not.
    void add_leaf(const std::string& given, Ref node, const std::string& why) {
        const bool is_tensor = TorchArchive::is_tensor(tree_, node);
        const std::string name = !given.empty() ? given : is_tensor ? "tensor" : "value";
        spend((is_tensor ? tensor_bytes : value_bytes) + 2 * static_cast<int64_t>(name.size()));
        try {
            if (!is_tensor) {
                into_.manifest_.values.emplace(name, checked_value_of(tree_, node, into_.budget_));
                return;
            }
            const StoredTensor stored = archive_.tensor(node);
            SavedTensor saved;
            saved.dtype = stored.dtype;
            saved.shape = stored.shape;
            if (stored.shape.product() > 0) {
                const Box whole = Box::whole(stored.shape);
                saved.pieces.push_back({whole, source_.file});
                into_.tensors_[name] = {stored.dtype, {{whole, {source_.file, 0, source_.file_bytes}, node}}};
            }
            into_.manifest_.tensors.emplace(name, std::make_shared<const SavedTensor>(std::move(saved)));
        } catch (const Error& error) {
            if (error.code() != Code::unsupported) throw;
            into_.manifest_.unreadable.emplace(name, why.empty() ? without_place(error, tree_.what()) : why);
        }
    }

    const TorchArchive& archive_;
    const Tree& tree_;
    const Source& source_;
    Flattener& into_;
};

void Flattener::spend(const TorchArchive& archive, int64_t bytes) {
    budget_ -= bytes;
    if (budget_ >= 0) return;
    throw Error(Code::unsupported, fmt::format("{}: the object is far larger than its file", archive.tree().what()));
}

void Flattener::add_object(const Source& source) {
    allow(*source.archive);
    Walk(*this, source).add("", source.archive->tree().root(), 0);
}

void Flattener::take_name(const TorchArchive& archive, const std::string& name) {
    try {
        check_name(name, "a name");
    } catch (const Error& error) {
        throw Error(Code::corrupt, fmt::format("{}: {}", archive.tree().what(), error.what()));
    }
    if (names_.insert(name).second) return;
    throw Error(Code::corrupt, fmt::format("{}: two objects have the name '{}'", archive.tree().what(), name));
}

void Flattener::add(const Source& source, const std::string& name, Ref object) {
    take_name(*source.archive, name);
    Walk(*this, source).add(name, object, 1);
}

}  // namespace tsr
