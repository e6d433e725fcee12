// Every kind of store under one face, for tests that all must pass: a house holds what the store needs (a server, a
// directory) and opens as many clients as the test wants.
#pragma once

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "patience.hpp"
#include "store/server.hpp"
#include "store/store.hpp"
#include "store/tls.hpp"
#include "temporary_directory.hpp"

namespace tsr::testing {

inline const std::string test_token(64, 'a');

inline StoreOptions test_store_options() {
    StoreOptions options;
    options.timeout = patience(milliseconds{20000});
    options.token = test_token;
    options.job_id = "test";
    options.epoch = 3;
    return options;
}

enum class StoreKind { memory, tcp, tcp_insecure, tcp_tls, file };
inline constexpr StoreKind store_kinds[] = {StoreKind::memory, StoreKind::tcp, StoreKind::tcp_insecure,
                                            StoreKind::tcp_tls, StoreKind::file};

inline std::string_view name_of(StoreKind kind) {
    switch (kind) {
        case StoreKind::memory: return "memory";
        case StoreKind::tcp: return "tcp";
        case StoreKind::tcp_insecure: return "tcp_insecure";
        case StoreKind::tcp_tls: return "tcp_tls";
        case StoreKind::file: return "file";
    }
    return "";
}

class StoreHouse {
   public:
    virtual ~StoreHouse() = default;
    virtual std::shared_ptr<Store> open() = 0;
};

class MemoryHouse final : public StoreHouse {
   public:
    std::shared_ptr<Store> open() override { return store_; }

   private:
    std::shared_ptr<Store> store_ = make_memory_store(patience(milliseconds{20000}));
};

class TcpHouse final : public StoreHouse {
   public:
    explicit TcpHouse(StoreOptions options)
        : options_(std::move(options)), server_(StoreServer::start("127.0.0.1", 0, options_)) {}
    std::shared_ptr<Store> open() override { return Store::open(server_->uri(), options_); }

   private:
    StoreOptions options_;
    std::shared_ptr<StoreServer> server_;
};

// What the environment says of TLS, while it lives.
class TlsSet {
   public:
    explicit TlsSet(const TlsOptions& options) {
        using Kind = TlsOptions::Kind;
        if (options.kind == Kind::token) ::setenv("TESSERA_TLS", "psk", 1);
        if (options.kind != Kind::certificates) return;
        ::setenv("TESSERA_TLS_CA", options.authority.c_str(), 1);
        ::setenv("TESSERA_TLS_CERT", options.certificate.c_str(), 1);
        ::setenv("TESSERA_TLS_KEY", options.key.c_str(), 1);
    }
    ~TlsSet() {
        for (const char* name : {"TESSERA_TLS", "TESSERA_TLS_CA", "TESSERA_TLS_CERT", "TESSERA_TLS_KEY"})
            ::unsetenv(name);
    }
    TlsSet(const TlsSet&) = delete;
    TlsSet& operator=(const TlsSet&) = delete;
};

class TlsHouse final : public StoreHouse {
   public:
    explicit TlsHouse(StoreOptions options) : house_(std::move(options)) {}
    std::shared_ptr<Store> open() override { return house_.open(); }

   private:
    TlsSet set_{{TlsOptions::Kind::token, "", "", ""}};
    TcpHouse house_;
};

class FileHouse final : public StoreHouse {
   public:
    std::shared_ptr<Store> open() override {
        return Store::open("file://" + directory_.path().string(), test_store_options());
    }

   private:
    TemporaryDirectory directory_;
};

inline std::unique_ptr<StoreHouse> make_house(StoreKind kind) {
    StoreOptions options = test_store_options();
    switch (kind) {
        case StoreKind::memory: return std::make_unique<MemoryHouse>();
        case StoreKind::tcp: return std::make_unique<TcpHouse>(options);
        case StoreKind::tcp_insecure: options.insecure = true; return std::make_unique<TcpHouse>(options);
        case StoreKind::tcp_tls: return std::make_unique<TlsHouse>(options);
        case StoreKind::file: return std::make_unique<FileHouse>();
    }
    return nullptr;
}

// The code of the error that `body` throws; nullopt if it throws none.
template <class Body>
std::optional<Code> code_of(Body&& body) {
    try {
        body();
    } catch (const Error& error) {
        return error.code();
    }
    return std::nullopt;
}

}  // namespace tsr::testing
