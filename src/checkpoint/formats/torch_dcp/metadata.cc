#include "checkpoint/formats/torch_dcp/metadata.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <unordered_map>

#include "base/error.hpp"
#include "checkpoint/formats/torch_dcp/pickle_writer.hpp"
#include "checkpoint/formats/torch_dcp/torch_archive.hpp"
#include "checkpoint/model/state.hpp"

namespace tsr {

namespace {

using pickle::Kind;
using pickle::no_ref;
using pickle::Ref;
using pickle::Tree;

constexpr std::string_view metadata_module = "torch.distributed.checkpoint.metadata";
constexpr size_t max_path_bytes = 1024;
constexpr size_t max_fields = 32;  // of an object; PyTorch's have up to five

// Whether the path is below the directory and all its parts are valid names.
bool is_inside(std::string_view path) {
    if (path.empty() || path.size() > max_path_bytes || path.front() == '/' || !is_utf8(path)) return false;
    while (true) {
        const size_t slash = path.find('/');
        const std::string_view part = path.substr(0, slash);
        if (part.empty() || part == "." || part == ".." || part.size() > 255) return false;
        if (std::any_of(part.begin(), part.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }))
            return false;
        if (slash == std::string_view::npos) return true;
        path.remove_prefix(slash + 1);
    }
}

class Parser {
   public:
    explicit Parser(const Tree& tree) : tree_(tree), budget_(static_cast<int64_t>(tree.size_bytes())) {}

    DcpMetadata run() {
        const Ref root = tree_.root();
        expect_class(root, metadata_module, "Metadata");
        index_storage(field(root, "storage_data"));
        const auto entries = dict_items(field(root, "state_dict_metadata"));
        for (size_t i = 0; i < entries.size(); i += 2) {
            const std::string name(tree_.as_text(entries[i]));
            try {
                check_name(name, "a name");
            } catch (const Error& error) {
                refuse(error.what());
            }
            if (out_.tensors.contains(name) || out_.values.contains(name) || out_.unreadable.contains(name)) {
                refuse(fmt::format("the name '{}' occurs twice", name));
            }
            try {
                add(name, entries[i + 1]);
            } catch (const Error& error) {
                if (error.code() != Code::unsupported) throw;
                // Without the file's name, which the caller adds.
                std::string_view why = error.what();
                if (why.starts_with(tree_.what() + ": ")) why.remove_prefix(tree_.what().size() + 2);
                out_.unreadable.emplace(name, why);
            }
        }
        return std::move(out_);
    }

   private:
    [[noreturn]] void refuse(std::string_view why) const {
        throw Error(Code::corrupt, fmt::format("{}: {}", tree_.what(), why));
    }

    void expect_class(Ref node, std::string_view module, std::string_view name) const {
        if (!tree_.is_call_of(node, module, name)) tree_.refuse(node, fmt::format("{}.{}", module, name));
    }
    Ref find_field(Ref object, std::string_view name) const {
        const Ref state = tree_.state(object);
        if (state == no_ref) return no_ref;
        // Each lookup is linear, and many objects may share one state.
        if (dict_items(state).size() > 2 * max_fields)
            refuse(fmt::format("{} has too many fields", tree_.name(object)));
        return tree_.find(state, name);
    }
    Ref field(Ref object, std::string_view name) const {
        const Ref found = find_field(object, name);
        if (found == no_ref) refuse(fmt::format("{} has no {}", tree_.name(object), name));
        return found;
    }
    std::span<const Ref> dict_items(Ref node) const {
        if (!tree_.is(node, Kind::dict)) tree_.refuse(node, "a dict");
        return tree_.items(node);
    }

    // --- storage_data: (name, offsets) -> where ---

    struct Key {
        uint32_t name = 0;
        Dims offsets;
        friend bool operator==(const Key&, const Key&) = default;
    };
    struct KeyHash {
        size_t operator()(const Key& key) const {
            size_t hash = key.name;
            for (const int64_t offset : key.offsets) {
                hash = (hash ^ static_cast<size_t>(offset)) * 0x9e3779b97f4a7c15u;
                hash ^= hash >> 29;
            }
            return hash;
        }
    };

    uint32_t number_of(std::string_view name) {
        return names_.emplace(name, static_cast<uint32_t>(names_.size())).first->second;
    }

    void index_storage(Ref node) {
        const auto entries = dict_items(node);
        places_.reserve(entries.size() / 2);
        for (size_t i = 0; i < entries.size(); i += 2) {
            const Ref index = entries[i];
            expect_class(index, metadata_module, "MetadataIndex");
            Key key{number_of(tree_.as_text(field(index, "fqn"))), {}};
            // A value has no offset, a scalar an empty one. A name is one or the other, so both may have the same key.
            const Ref offset = find_field(index, "offset");
            if (offset != no_ref && !tree_.is(offset, Kind::none)) {
                try {
                    key.offsets = dims_of(tree_, offset);
                } catch (const Error& error) {
                    if (error.code() != Code::unsupported) throw;
                    continue;  // of a tensor with too many dimensions, which is reported for its shape
                }
            }
            if (!places_.emplace(key, entries[i + 1]).second) {
                refuse(fmt::format("storage_data lists '{}' at {} twice",
                                   tree_.as_text(field(index, "fqn")).substr(0, 200), key.offsets.str()));
            }
        }
    }

    DcpItem item_of(const std::string& name, const Dims& offsets) {
        const auto number = names_.find(name);
        const auto place = number == names_.end() ? places_.end() : places_.find({number->second, offsets});
        if (place == places_.end()) {
            refuse(fmt::format("'{}': storage_data has no entry for its part at {}", name, offsets.str()));
        }
        const Ref info = place->second;
        if (!tree_.is_call_of(info, "torch.distributed.checkpoint.filesystem", "_StorageInfo")) {
            throw Error(
                Code::unsupported,
                fmt::format("its bytes are described by {}, which only its own storage can read", tree_.name(info)));
        }
        const Ref transforms = find_field(info, "transform_descriptors");
        if (transforms != no_ref && !tree_.is(transforms, Kind::none) && !tree_.items(transforms).empty()) {
            const Ref first = tree_.items(transforms)[0];
            throw Error(Code::unsupported,
                        fmt::format("its bytes were transformed ({}); save without transforms",
                                    tree_.is(first, Kind::text) ? tree_.as_text(first).substr(0, 50) : "?"));
        }
        DcpItem item;
        const std::string_view path = tree_.as_text(field(info, "relative_path"));
        const auto known = files_.find(path);
        if (known != files_.end()) {
            item.file = known->second;
        } else {
            if (!is_inside(path))
                refuse(fmt::format("'{}' is in a file whose path is invalid or outside the directory", name));
            item.file = static_cast<int>(out_.files.size());
            out_.files.emplace_back(path);
            files_.emplace(path, item.file);
        }
        item.offset = tree_.as_int(field(info, "offset"));
        item.length = tree_.as_int(field(info, "length"));
        int64_t end = 0;
        if (item.offset < 0 || item.length < 0 || __builtin_add_overflow(item.offset, item.length, &end)) {
            refuse(fmt::format("'{}' has the invalid length {} or offset {}", name, item.length, item.offset));
        }
        return item;
    }

    // --- state_dict_metadata ---

    void add(const std::string& name, Ref node) {
        if (tree_.is_call_of(node, metadata_module, "BytesStorageMetadata")) {
            out_.values.emplace(name, item_of(name, {}));
            return;
        }
        expect_class(node, metadata_module, "TensorStorageMetadata");
        DcpTensor tensor;
        tensor.shape = dims_of(tree_, field(node, "size"));
        tensor.dtype = dtype_in(field(node, "properties"));
        try {
            check_shape(tensor.shape, tensor.dtype, "it");
        } catch (const Error& error) {
            refuse(fmt::format("tensor '{}': {}", name, error.what()));
        }
        const Ref chunks = field(node, "chunks");
        if (!tree_.is(chunks, Kind::list)) tree_.refuse(chunks, "a list");
        std::vector<Box> boxes;
        int64_t covered = 0;
        for (const Ref chunk : tree_.items(chunks)) {
            if (--budget_ < 0) refuse("it has more chunks than its size allows");
            expect_class(chunk, metadata_module, "ChunkStorageMetadata");
            Box box{dims_of(tree_, field(chunk, "offsets")), dims_of(tree_, field(chunk, "sizes"))};
            if (!box.inside(tensor.shape)) {
                refuse(fmt::format("tensor '{}' {} has a chunk outside of it, at {} with sizes {}", name,
                                   tensor.shape.str(), box.offsets.str(), box.sizes.str()));
            }
            if (box.empty()) continue;
            if (__builtin_add_overflow(covered, box.numel(), &covered)) refuse("it has too many chunks");
            tensor.chunks.push_back({box, item_of(name, box.offsets)});
            boxes.push_back(box);
        }
        const int count = static_cast<int>(boxes.size());
        bool disjoint = true;
        try {
            (void)Layout::from_boxes(tensor.shape, boxes, std::span(&count, 1));
        } catch (const Error&) {
            disjoint = false;
        }
        if (!disjoint || covered != tensor.shape.product()) {
            refuse(fmt::format("tensor '{}' {}: its {} chunks do not cover it exactly once", name, tensor.shape.str(),
                               boxes.size()));
        }
        out_.tensors.emplace(name, std::move(tensor));
    }

    DType dtype_in(Ref properties) const {
        // Up to PyTorch 2.3 the class was in another module.
        if (!tree_.is_call_of(properties, metadata_module, "TensorProperties")) {
            expect_class(properties, "torch.distributed._shard.sharded_tensor.metadata", "TensorProperties");
        }
        const Ref state = tree_.state(properties);
        if (state == no_ref) refuse("TensorProperties has no state");
        if (tree_.is(state, Kind::dict)) return dtype_of(tree_, field(properties, "dtype"));
        if (!tree_.is(state, Kind::tuple) || tree_.items(state).empty())
            tree_.refuse(state, "the state of TensorProperties");
        return dtype_of(tree_, tree_.items(state)[0]);
    }

    const Tree& tree_;
    int64_t budget_;
    DcpMetadata out_;
    std::unordered_map<std::string_view, uint32_t> names_;
    std::unordered_map<Key, Ref, KeyHash> places_;
    std::unordered_map<std::string_view, int> files_;
};

// Writes the object that PyTorch's FileSystemReader unpickles. Classes and names are stored once and pushed again.
class Dumper {
   public:
    std::string run(const DcpMetadata& metadata) {
        begin_object(metadata_module, "Metadata");
        key("state_dict_metadata");
        dict([&] {
            for (const auto& [name, tensor] : metadata.tensors) {
                text(name);
                add(tensor);
            }
            for (const auto& [name, item] : metadata.values) {
                text(name);
                global(metadata_module, "BytesStorageMetadata");
                out_.empty_tuple();
                out_.new_object();
            }
        });
        key("planner_data");
        dict([&] {
            const auto add_path = [&](const std::string& name) {
                text(name);
                text(name);
                out_.tuple1();
            };
            for (const auto& [name, tensor] : metadata.tensors) add_path(name);
            for (const auto& [name, item] : metadata.values) add_path(name);
        });
        key("storage_data");
        dict([&] {
            for (const auto& [name, tensor] : metadata.tensors) {
                int64_t index = 0;
                for (const DcpChunk& chunk : tensor.chunks) add_place(metadata, name, &chunk.box, index++, chunk.item);
            }
            for (const auto& [name, item] : metadata.values) add_place(metadata, name, nullptr, 0, item);
        });
        key("storage_meta");
        out_.none();
        key("version");
        text("1.0.0");
        end_object();
        return out_.finish();
    }

   private:
    void global(std::string_view module, std::string_view name) {
        stored(std::string(module) + '\n' + std::string(name), [&] { out_.global(module, name); });
    }
    void text(std::string_view value) {
        stored(std::string(value), [&] { out_.text(value); });
    }
    void key(std::string_view name) { text(name); }
    template <class Make>
    void stored(std::string what, Make make) {
        const auto found = memo_.find(what);
        if (found != memo_.end()) return out_.get(found->second);
        make();
        memo_.emplace(std::move(what), out_.put());
    }
    template <class Fill>
    void dict(Fill fill) {
        out_.empty_dict();
        out_.mark();
        fill();
        out_.setitems();
    }
    void begin_object(std::string_view module, std::string_view name) {
        global(module, name);
        out_.empty_tuple();
        out_.new_object();
        out_.empty_dict();
        out_.mark();
    }
    void end_object() {
        out_.setitems();
        out_.build();
    }
    void size(const Dims& dims) {
        global("torch", "Size");
        out_.mark();
        for (const int64_t n : dims) out_.integer(n);
        out_.tuple();
        out_.tuple1();
        out_.reduce();
    }

    void add(const DcpTensor& tensor) {
        begin_object(metadata_module, "TensorStorageMetadata");
        key("properties");
        global(metadata_module, "TensorProperties");
        out_.empty_tuple();
        out_.new_object();
        out_.mark();
        global("torch", torch_name(tensor.dtype));
        stored("torch.strided\n", [&] {
            out_.global("torch.serialization", "_get_layout");
            out_.text("torch.strided");
            out_.tuple1();
            out_.reduce();
        });
        out_.boolean(false);
        stored("memory format\n", [&] {
            out_.global(metadata_module, "_MEM_FORMAT_ENCODING");
            out_.integer(0);
            out_.tuple1();
            out_.reduce();
        });
        out_.boolean(false);
        out_.tuple();
        out_.build();
        key("size");
        size(tensor.shape);
        key("chunks");
        out_.empty_list();
        out_.mark();
        for (const DcpChunk& chunk : tensor.chunks) {
            begin_object(metadata_module, "ChunkStorageMetadata");
            key("offsets");
            size(chunk.box.offsets);
            key("sizes");
            size(chunk.box.sizes);
            end_object();
        }
        out_.appends();
        end_object();
    }

    void add_place(const DcpMetadata& metadata, const std::string& name, const Box* box, int64_t index,
                   const DcpItem& item) {
        begin_object(metadata_module, "MetadataIndex");
        key("fqn");
        text(name);
        if (box != nullptr) {
            key("offset");
            size(box->offsets);
        }
        key("index");
        box != nullptr ? out_.integer(index) : out_.none();
        end_object();
        begin_object("torch.distributed.checkpoint.filesystem", "_StorageInfo");
        key("relative_path");
        text(metadata.files[static_cast<size_t>(item.file)]);
        key("offset");
        out_.integer(item.offset);
        key("length");
        out_.integer(item.length);
        end_object();
    }

    pickle::PickleWriter out_;
    std::unordered_map<std::string, uint32_t> memo_;
};

}  // namespace

std::string DcpMetadata::dump() const { return Dumper().run(*this); }

DcpMetadata DcpMetadata::parse(std::string pickle, const std::string& path) {
    const Tree tree = Tree::parse(std::move(pickle), path);
    return Parser(tree).run();
}

}  // namespace tsr
