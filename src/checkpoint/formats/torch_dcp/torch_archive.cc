#include "checkpoint/formats/torch_dcp/torch_archive.hpp"

#include <fmt/core.h>
#include <openssl/bn.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "base/base64.hpp"
#include "base/error.hpp"
#include "checkpoint/model/value.hpp"

namespace tsr {

namespace {

using pickle::Kind;
using pickle::no_ref;
using pickle::Ref;
using pickle::Tree;

// Types without their own storage class are in untyped storages.
struct TorchType {
    std::string_view name;
    std::string_view storage;
    DType dtype;
};
constexpr TorchType torch_types[] = {
    {"float32", "FloatStorage", DType::f32},
    {"float64", "DoubleStorage", DType::f64},
    {"float16", "HalfStorage", DType::f16},
    {"bfloat16", "BFloat16Storage", DType::bf16},
    {"int64", "LongStorage", DType::i64},
    {"int32", "IntStorage", DType::i32},
    {"int16", "ShortStorage", DType::i16},
    {"int8", "CharStorage", DType::i8},
    {"uint8", "ByteStorage", DType::u8},
    {"bool", "BoolStorage", DType::boolean},
    {"uint16", "", DType::u16},
    {"uint32", "", DType::u32},
    {"uint64", "", DType::u64},
    {"float8_e4m3fn", "", DType::f8_e4m3},
    {"float8_e5m2", "", DType::f8_e5m2},
    {"float8_e8m0fnu", "", DType::f8_e8m0},
    {"complex64", "ComplexFloatStorage", DType::c64},
    {"complex128", "ComplexDoubleStorage", DType::c128},
};

constexpr std::string_view rebuild_module = "torch._utils";
constexpr size_t max_integer_bytes = 4096;

[[noreturn]] void unsupported(const Tree& tree, const std::string& why) {
    throw Error(Code::unsupported, fmt::format("{}: {}", tree.what(), why));
}

Json tagged(const char* kind, Json value) {
    Json json;
    json.set("~", kind);
    json.set("v", std::move(value));
    return json;
}

Json big_integer(const Tree& tree, std::string_view bytes) {
    if (bytes.size() > max_integer_bytes)
        unsupported(tree, fmt::format("integers of {} bytes are not supported", bytes.size()));
    std::string magnitude(bytes);
    const bool negative = (static_cast<uint8_t>(bytes.back()) & 0x80) != 0;
    if (negative) {
        bool carry = true;
        for (char& c : magnitude) {
            const auto inverted = static_cast<uint8_t>(~static_cast<uint8_t>(c));
            c = static_cast<char>(inverted + (carry ? 1 : 0));
            carry = carry && inverted == 0xff;
        }
    }
    const std::unique_ptr<BIGNUM, decltype(&BN_free)> number(
        BN_lebin2bn(reinterpret_cast<const unsigned char*>(magnitude.data()), static_cast<int>(magnitude.size()),
                    nullptr),
        &BN_free);
    char* digits = number ? BN_bn2dec(number.get()) : nullptr;
    if (digits == nullptr) throw Error(Code::no_memory, "cannot allocate a large integer");
    const std::string text = fmt::format("{}{}", negative ? "-" : "", digits);
    OPENSSL_free(digits);
    return tagged("int", text);
}

// "y" -> bytes as written by protocol 2: text of code points below 256.
std::string latin1(const Tree& tree, std::string_view text) {
    std::string bytes;
    for (size_t i = 0; i < text.size(); ++i) {
        const auto c = static_cast<uint8_t>(text[i]);
        if (c < 0x80) {
            bytes += text[i];
        } else if ((c == 0xc2 || c == 0xc3) && i + 1 < text.size() &&
                   (static_cast<uint8_t>(text[i + 1]) & 0xc0) == 0x80) {
            bytes += static_cast<char>(c << 6 | (static_cast<uint8_t>(text[++i]) & 0x3f));
        } else {
            throw Error(Code::corrupt, fmt::format("{}: bytes contain characters beyond 255", tree.what()));
        }
    }
    return bytes;
}

const Ref& argument(const Tree& tree, Ref call, size_t index) {
    const auto arguments = tree.arguments(call);
    if (index >= arguments.size()) {
        throw Error(Code::corrupt,
                    fmt::format("{}: {} has only {} arguments", tree.what(), tree.name(call), arguments.size()));
    }
    return arguments[index];
}

bool is_rebuild(const Tree& tree, Ref node, std::string_view function) {
    return tree.is_call_of(node, rebuild_module, function);
}

}  // namespace

std::optional<DType> dtype_from_torch(std::string_view name) {
    for (const TorchType& type : torch_types) {
        if (type.name == name) return type.dtype;
    }
    return std::nullopt;
}

namespace {

const TorchType& torch_type(DType dtype) {
    return *std::find_if(std::begin(torch_types), std::end(torch_types),
                         [&](const TorchType& type) { return type.dtype == dtype; });
}

}  // namespace

std::string_view torch_name(DType dtype) { return torch_type(dtype).name; }
std::string_view torch_storage_name(DType dtype) { return torch_type(dtype).storage; }

DType dtype_of(const Tree& tree, Ref node) {
    if (!tree.is(node, Kind::global) || tree.module_of(node) != "torch") tree.refuse(node, "a torch dtype");
    if (const auto dtype = dtype_from_torch(tree.name_of(node))) return *dtype;
    unsupported(tree, fmt::format("Tessera has no dtype for {}", tree.name(node)));
}

Dims dims_of(const Tree& tree, Ref node) {
    if (tree.is_call_of(node, "torch", "Size")) node = argument(tree, node, 0);
    if (!tree.is(node, Kind::tuple) && !tree.is(node, Kind::list)) tree.refuse(node, "a size");
    const auto items = tree.items(node);
    if (items.size() > static_cast<size_t>(max_ndim)) {
        unsupported(tree, fmt::format("a tensor has {} dimensions; at most {} are supported", items.size(), max_ndim));
    }
    std::vector<int64_t> numbers;
    for (const Ref item : items) {
        numbers.push_back(tree.as_int(item));
        if (numbers.back() < 0) {
            throw Error(Code::corrupt, fmt::format("{}: a size or offset is {}", tree.what(), numbers.back()));
        }
    }
    return Dims(numbers);
}

TorchArchive::TorchArchive(PartReader& part) : zip_(ZipArchive::read(part)) {
    const auto read = [&](std::string_view name, int64_t max_size) {
        const ZipEntry* entry = zip_.find(name);
        return entry == nullptr ? std::string() : zip_.read_entry(part, *entry, max_size);
    };
    if (zip_.find("data.pkl") == nullptr) {
        part.refuse(zip_.find("constants.pkl") != nullptr || zip_.find("code") != nullptr
                        ? "it is a TorchScript module, not a torch.save file"
                        : "it has no data.pkl: torch.save did not write it");
    }
    if (zip_.find("constants.pkl") != nullptr) {
        throw Error(Code::unsupported,
                    fmt::format("{} is a TorchScript module; save its state_dict() to read it here", part.path()));
    }
    if (const std::string order = read("byteorder", 16); !order.empty() && order != "little") {
        throw Error(Code::unsupported, fmt::format("{}: its byte order is '{}'; only little endian is supported",
                                                   part.path(), order == "big" ? "big" : "?"));
    }
    tree_ = Tree::parse(read("data.pkl", pickle::max_bytes), fmt::format("{}: data.pkl", part.path()));
}

bool TorchArchive::is_tensor(const Tree& tree, Ref node) {
    if (!tree.is(node, Kind::call) || !tree.is(tree.callee(node), Kind::global)) return false;
    const std::string_view module = tree.module_of(tree.callee(node));
    const std::string_view name = tree.name_of(tree.callee(node));
    return (module == rebuild_module || module == "torch._tensor") && name.starts_with("_rebuild_");
}

namespace {

// A parameter is a tensor with a flag; so is a subclass that adds no data.
Ref without_parameter(const Tree& tree, Ref node) {
    for (int depth = 0;; ++depth) {
        if (depth > 4) throw Error(Code::corrupt, fmt::format("{}: a parameter is nested in a parameter", tree.what()));
        if (!is_rebuild(tree, node, "_rebuild_parameter") && !is_rebuild(tree, node, "_rebuild_parameter_with_state"))
            return node;
        node = argument(tree, node, 0);
    }
}

// That the storage has the tensor's last element.
void check_extent(const Tree& tree, const StoredTensor& stored) {
    const auto itemsize = static_cast<int64_t>(size_of(stored.dtype));
    int64_t last = stored.first;
    for (int d = 0; d < stored.shape.ndim(); ++d) {
        int64_t step = 0;
        if (__builtin_mul_overflow(stored.shape[d] - 1, stored.strides[d], &step) ||
            __builtin_add_overflow(last, step, &last)) {
            last = stored.entry->size;
            break;
        }
    }
    if (last >= stored.entry->size / itemsize) {
        throw Error(
            Code::corrupt,
            fmt::format("{}: a tensor with sizes {}, strides {} and offset {} exceeds its storage of {} "
                        "bytes",
                        tree.what(), stored.shape.str(), stored.strides.str(), stored.first, stored.entry->size));
    }
}

}  // namespace

StoredTensor TorchArchive::tensor(Ref node) const {
    const Tree& tree = tree_;
    node = without_parameter(tree, node);
    const bool v2 = is_rebuild(tree, node, "_rebuild_tensor_v2") || is_rebuild(tree, node, "_rebuild_tensor");
    const bool v3 = is_rebuild(tree, node, "_rebuild_tensor_v3");
    if (!v2 && !v3) {
        std::string what = tree.name(node);
        if (tree.is_call_of(node, "torch._tensor", "_rebuild_from_type_v2")) what = tree.name(argument(tree, node, 1));
        unsupported(tree, fmt::format("{} is not supported; only dense tensors are", what));
    }
    const Ref storage = tree.persistent_id(argument(tree, node, 0));
    const auto id = tree.items(storage);
    if (!tree.is(storage, Kind::tuple) || id.size() != 5 || tree.as_text(id[0]) != "storage") {
        throw Error(Code::corrupt, fmt::format("{}: a persistent id is not a storage", tree.what()));
    }
    const Ref type = id[1];
    const bool untyped =
        tree.is_global(type, "torch.storage", "UntypedStorage") || tree.is_global(type, "torch", "UntypedStorage");
    StoredTensor stored;
    if (v3) {
        stored.dtype = dtype_of(tree, argument(tree, node, 6));
    } else {
        const auto* found = std::find_if(std::begin(torch_types), std::end(torch_types), [&](const TorchType& one) {
            return !one.storage.empty() && tree.is_global(type, "torch", one.storage);
        });
        if (found == std::end(torch_types)) {
            if (!tree.is(type, Kind::global)) tree.refuse(type, "a storage class");
            unsupported(tree, fmt::format("Tessera has no dtype for {}", tree.name(type)));
        }
        stored.dtype = found->dtype;
    }
    const auto itemsize = static_cast<int64_t>(size_of(stored.dtype));
    stored.first = tree.as_int(argument(tree, node, 1));
    stored.shape = dims_of(tree, argument(tree, node, 2));
    stored.strides = dims_of(tree, argument(tree, node, 3));
    if (stored.strides.ndim() != stored.shape.ndim() || stored.first < 0) {
        throw Error(Code::corrupt, fmt::format("{}: a tensor has the invalid sizes {}, strides {} and offset {}",
                                               tree.what(), stored.shape.str(), stored.strides.str(), stored.first));
    }
    try {
        check_shape(stored.shape, stored.dtype, "a tensor");
    } catch (const Error& error) {
        throw Error(Code::corrupt, fmt::format("{}: {}", tree.what(), error.what()));
    }
    const std::string key = fmt::format("data/{}", tree.as_text(id[2]));
    stored.entry = zip_.find(key);
    const int64_t count = tree.as_int(id[4]);
    if (stored.entry == nullptr) {
        if (stored.shape.product() == 0) return stored;
        throw Error(Code::corrupt,
                    fmt::format("{}: its storage {} is missing", tree.what(), tree.as_text(id[2]).substr(0, 20)));
    }
    int64_t bytes = 0;
    if (__builtin_mul_overflow(count, untyped ? 1 : itemsize, &bytes) || bytes != stored.entry->size) {
        throw Error(Code::corrupt, fmt::format("{}: storage {} has {} bytes, but should have {} elements", tree.what(),
                                               key, stored.entry->size, count));
    }
    if (stored.shape.product() == 0) return stored;
    check_extent(tree, stored);
    return stored;
}

namespace {

// A value from its pickle. Each value pays for its contents before they are created; its own slot is paid for by its
// container.
class PlainValue {
   public:
    PlainValue(const Tree& tree, int64_t& budget) : tree_(tree), budget_(budget) {}

    Json of(Ref node, int depth) {
        if (depth > max_value_depth)
            unsupported(tree_, fmt::format("it is nested more than {} levels deep", max_value_depth));
        spend(1, 1);  // a list of nothing takes time
        switch (tree_.kind(node)) {
            case Kind::none: return {};
            case Kind::boolean: return Json(tree_.as_bool(node));
            case Kind::integer: return Json(tree_.as_int(node));
            case Kind::big_integer:
                spend(2, sizeof(Json::Member));
                spend(tree_.as_big_integer(node).size(), 3);  // digits
                return big_integer(tree_, tree_.as_big_integer(node));
            case Kind::real:
                if (!std::isfinite(tree_.as_real(node))) spend(2, sizeof(Json::Member));
                return double_value(tree_.as_real(node));
            case Kind::text: return Json(text_of(node));
            case Kind::bytes: return bytes_of(tree_.as_bytes(node));
            case Kind::tuple: spend(2, sizeof(Json::Member)); return tagged("tuple", list_of(tree_.items(node), depth));
            case Kind::list: return list_of(tree_.items(node), depth);
            case Kind::dict: return dict_of(tree_.items(node), depth);
            case Kind::call: return call_of(node, depth);
            case Kind::set:
            case Kind::global:
            case Kind::persistent: break;
        }
        refuse(node);
    }

   private:
    void spend(size_t count, size_t size) {
        budget_ -= static_cast<int64_t>(count * size);
        if (budget_ < 0) unsupported(tree_, "a value is far larger than its file");
    }
    [[noreturn]] void refuse(Ref node) const {
        unsupported(tree_, fmt::format("{} is not plain data", tree_.name(node)));
    }

    Json list_of(std::span<const Ref> items, int depth) {
        spend(items.size(), sizeof(Json));
        Json::Array list;
        list.reserve(items.size());
        for (const Ref item : items) list.push_back(of(item, depth + 1));
        return Json(std::move(list));
    }
    std::string text_of(Ref text) {
        const std::string_view found = tree_.as_text(text);
        if (!is_utf8(found)) unsupported(tree_, "a string is not UTF-8");
        spend(found.size(), 1);
        return std::string(found);
    }
    Json bytes_of(std::string_view bytes) {
        spend(2, sizeof(Json::Member) + bytes.size());  // base64 is less than twice as long
        return tagged("bytes", to_base64(bytes));
    }

    // Keys and values in turn.
    Json dict_of(std::span<const Ref> items, int depth) {
        bool plain = true;
        for (size_t i = 0; i < items.size(); i += 2) {
            plain = plain && tree_.is(items[i], Kind::text) && tree_.as_text(items[i]) != "~";
        }
        if (plain) return object_of(items, depth);
        spend(2, sizeof(Json::Member));
        spend(items.size() / 2, sizeof(Json));
        Json::Array pairs;
        pairs.reserve(items.size() / 2);
        for (size_t i = 0; i < items.size(); i += 2) pairs.push_back(list_of(items.subspan(i, 2), depth));
        return tagged("map", Json(std::move(pairs)));
    }
    Json object_of(std::span<const Ref> items, int depth) {
        spend(items.size() / 2, sizeof(Json::Member));
        Json::Object members;
        members.reserve(items.size() / 2);
        for (size_t i = 0; i < items.size(); i += 2) {
            std::string key = text_of(items[i]);
            members.push_back({std::move(key), of(items[i + 1], depth + 1)});
        }
        std::vector<std::string_view> keys;
        for (const Json::Member& member : members) keys.emplace_back(member.key);
        std::sort(keys.begin(), keys.end());
        if (std::adjacent_find(keys.begin(), keys.end()) != keys.end())
            unsupported(tree_, "a dict has the same key twice");
        return Json(std::move(members));
    }

    // Bytes as written by protocol 2, and a few classes that are plain data.
    Json call_of(Ref node, int depth) {
        const bool is_bytes = tree_.is_call_of(node, "_codecs", "encode");
        if (is_bytes && tree_.arguments(node).size() == 2 && tree_.is(tree_.arguments(node)[1], Kind::text) &&
            tree_.as_text(tree_.arguments(node)[1]) == "latin1") {
            return bytes_of(latin1(tree_, tree_.as_text(tree_.arguments(node)[0])));
        }
        for (const std::string_view builtins : {"builtins", "__builtin__"}) {
            if (tree_.is_call_of(node, builtins, "bytes") && tree_.arguments(node).empty()) return bytes_of("");
        }
        if (tree_.is_call_of(node, "torch", "Size")) return of(argument(tree_, node, 0), depth + 1);
        refuse(node);
    }

    const Tree& tree_;
    int64_t& budget_;
};

}  // namespace

Json value_of(const Tree& tree, Ref node, int64_t& budget, int depth) {
    return PlainValue(tree, budget).of(node, depth);
}

}  // namespace tsr
