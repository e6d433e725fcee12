// Store::open and what a store's options take from the environment.
#include <fmt/core.h>

#include "base/env.hpp"
#include "base/error.hpp"
#include "store/address.hpp"
#include "store/file_store.hpp"
#include "store/store.hpp"
#include "store/tcp_store.hpp"
#include "store/tls.hpp"

namespace tsr {

StoreOptions StoreOptions::from_environment() {
    StoreOptions options;
    options.insecure = env_flag("TESSERA_INSECURE");
    options.job_id = env_text("TESSERA_JOB_ID").value_or("");
    options.epoch = static_cast<uint64_t>(env_number("TESSERA_EPOCH", 0, INT64_MAX).value_or(0));
    return options;
}

std::shared_ptr<Store> Store::open(const std::string& uri, const StoreOptions& options) {
    constexpr std::string_view file_scheme = "file://";
    if (uri.starts_with("tcp://")) return open_tcp_store(Address::parse(uri), options);
    if (!uri.starts_with(file_scheme)) {
        throw Error(Code::invalid_argument,
                    fmt::format("the store address '{}' must be tcp://host:port or file:///directory", uri));
    }
    const std::string directory = uri.substr(file_scheme.size());
    if (!directory.starts_with('/')) {
        throw Error(Code::invalid_argument,
                    fmt::format("the store address '{}' must name an absolute directory: file:///directory", uri));
    }
    if (TlsOptions::from_environment().kind != TlsOptions::Kind::off) {
        throw Error(
            Code::unsupported,
            fmt::format("TESSERA_TLS is set, but the store '{}' is files, which nothing encrypts on their way to a "
                        "file server; use a store at tcp://host:port, or unset TESSERA_TLS",
                        uri));
    }
    return open_file_store(directory, options);
}

}  // namespace tsr
