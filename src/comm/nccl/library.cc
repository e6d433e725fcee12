#include "comm/nccl/library.hpp"

#include <dlfcn.h>
#include <fmt/core.h>
#include <link.h>

#include <optional>

#include "base/env.hpp"

namespace tsr::nccl {

namespace {

constexpr const char* system_name = "libnccl.so.2";

struct Loaded {
    Library library;
    std::optional<Error> failure;  // why there is no NCCL
};

Error unusable(const std::string& why) {
    return {Code::unsupported,
            fmt::format("NCCL cannot be used: {}; set TESSERA_NCCL to the path of a libnccl.so.2, or install it", why)};
}

Loaded load() {
    Loaded loaded;
    const auto path = env_text("TESSERA_NCCL");
    // Two copies in one process do not know of each other's use of the devices: one that the program has loaded comes first.
    void* handle = path ? nullptr : ::dlopen(system_name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (handle == nullptr) handle = ::dlopen(path ? path->c_str() : system_name, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        loaded.failure = unusable(fmt::format("it cannot be loaded ({})", ::dlerror()));
        return loaded;
    }
    Library& library = loaded.library;
    const link_map* place = nullptr;
    if (::dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&place)) == 0 && place != nullptr)
        library.path = place->l_name;
    const char* missing = nullptr;
#define TSR_LOOK_UP(member, symbol, parameters)                                            \
    library.member = reinterpret_cast<decltype(library.member)>(::dlsym(handle, #symbol)); \
    if (library.member == nullptr) missing = #symbol;
    TSR_NCCL(TSR_LOOK_UP)
    TSR_NCCL_TEXT(TSR_LOOK_UP)
#undef TSR_LOOK_UP
    if (library.get_version != nullptr) library.get_version(&library.version);
    if (missing != nullptr || library.version < static_cast<int>(Config::oldest_version)) {
        loaded.failure = unusable(fmt::format(
            "{} is version {}{}, but {} is the oldest that is supported", library.path, version_text(library.version),
            missing == nullptr ? "" : fmt::format(" and has no {}", missing), version_text(Config::oldest_version)));
        return loaded;
    }
    return loaded;
}

}  // namespace

const Library& library() {
    static const Loaded& loaded = *new Loaded(load());  // threads may use it until the process ends
    if (loaded.failure) throw Error(*loaded.failure);
    return loaded.library;
}

std::string version_text(int version) {
    return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

Error error_of(Result result, Comm comm, const std::string& what) {
    const Library& nccl = library();
    const char* text = nccl.error_string(result);
    const char* last = nccl.last_error(comm);
    std::string message = fmt::format("{}: NCCL {} failed: {} ({})", what, version_text(nccl.version),
                                      text == nullptr ? "unknown error" : text, result);
    if (last != nullptr && *last != '\0') message += fmt::format("; it says: {}", last);
    return Error(result == remote_error ? Code::peer_lost : Code::nccl, message)
        .with_native(NativeDomain::nccl, result);
}

int number_of(DType dtype) {
    const auto type = [&]() -> Type {
        switch (dtype) {
            case DType::i8: return Type::i8;
            case DType::u8: return Type::u8;
            case DType::i32: return Type::i32;
            case DType::u32: return Type::u32;
            case DType::i64: return Type::i64;
            case DType::u64: return Type::u64;
            case DType::f16: return Type::f16;
            case DType::f32: return Type::f32;
            case DType::f64: return Type::f64;
            case DType::bf16: return Type::bf16;
            case DType::f8_e4m3:
            case DType::f8_e5m2:
                if (const int version = library().version; version < oldest_with_f8) {
                    throw Error(Code::unsupported,
                                fmt::format("NCCL {} cannot reduce {}; {} is the oldest that can",
                                            version_text(version), name_of(dtype), version_text(oldest_with_f8)));
                }
                return dtype == DType::f8_e4m3 ? Type::f8_e4m3 : Type::f8_e5m2;
            default: throw Error(Code::unsupported, fmt::format("NCCL cannot reduce {}", name_of(dtype)));
        }
    };
    return static_cast<int>(type());
}

int number_of(ReduceOp op) {
    const auto number = [&]() -> Op {
        switch (op) {
            case ReduceOp::sum: return Op::sum;
            case ReduceOp::avg: return Op::avg;
            case ReduceOp::min: return Op::min;
            case ReduceOp::max: return Op::max;
            case ReduceOp::prod: return Op::prod;
            case ReduceOp::none: break;
        }
        throw Error(Code::invalid_argument, fmt::format("unknown reduction {}", static_cast<int>(op)));
    };
    return static_cast<int>(number());
}

}  // namespace tsr::nccl
