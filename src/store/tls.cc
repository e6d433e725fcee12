#include "store/tls.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <openssl/err.h>
#include <openssl/kdf.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/fd.hpp"
#include "store/token.hpp"

namespace tsr {

namespace {

constexpr const char* suite = "TLS_AES_256_GCM_SHA384";
constexpr unsigned char suite_number[] = {0x13, 0x02};
// OpenSSL demands a name for where a session may be resumed, although a key is no former session.
constexpr unsigned char place[] = {'t', 'e', 's', 's', 'e', 'r', 'a'};
constexpr const char* groups = "X25519:P-256";
constexpr size_t psk_size = 48;  // as long as the suite's hash

template <auto free>
struct Free {
    template <class T>
    void operator()(T* object) const {
        free(object);
    }
};
using Session = std::unique_ptr<SSL_SESSION, Free<SSL_SESSION_free>>;

// OpenSSL's reasons of the calling thread, which are then forgotten: the program may use OpenSSL, too.
std::string reason() {
    std::string text;
    while (const unsigned long code = ERR_get_error()) {
        const char* known = ERR_reason_error_string(code);
        if (known == nullptr) continue;
        if (!text.empty()) text += ", ";
        text += known;
    }
    return text.empty() ? "OpenSSL gives no reason" : text;
}

Error broken(const char* what) { return Error(Code::internal, fmt::format("OpenSSL cannot {}: {}", what, reason())); }

// A library context of our own: settings of the program and of /etc/ssl/openssl.cnf do not change what it accepts, and it
// still works while the process exits, when OpenSSL has cleaned up the program's. Never freed for that reason.
OSSL_LIB_CTX* library() {
    static OSSL_LIB_CTX* const instance = OSSL_LIB_CTX_new();
    if (instance == nullptr) throw Error(Code::no_memory, "OpenSSL cannot make a library context");
    return instance;
}

// HKDF-SHA-384. The salt keeps this key apart from those of the handshake's MACs.
std::array<uint8_t, psk_size> derive(const Token& token, std::string_view info) {
    constexpr std::string_view salt = "tessera store 1 tls";
    const std::unique_ptr<EVP_KDF, Free<EVP_KDF_free>> kdf(EVP_KDF_fetch(library(), "HKDF", nullptr));
    const std::unique_ptr<EVP_KDF_CTX, Free<EVP_KDF_CTX_free>> context(EVP_KDF_CTX_new(kdf.get()));
    const auto octets = [](const char* name, const void* data, size_t size) {
        return OSSL_PARAM_construct_octet_string(name, const_cast<void*>(data), size);
    };
    char digest[] = "SHA384";
    OSSL_PARAM parameters[] = {
        OSSL_PARAM_construct_utf8_string("digest", digest, 0), octets("key", token.bytes.data(), token.bytes.size()),
        octets("salt", salt.data(), salt.size()), octets("info", info.data(), info.size()), OSSL_PARAM_construct_end()};
    std::array<uint8_t, psk_size> key{};
    if (context == nullptr || EVP_KDF_derive(context.get(), key.data(), key.size(), parameters) != 1) {
        throw broken("derive a key");
    }
    return key;
}

void check_private(const std::string& path) {
    const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
    struct stat info{};
    if (!file.valid() || ::fstat(file.get(), &info) != 0) {
        throw os_error(fmt::format("cannot open the TLS key '{}' (TESSERA_TLS_KEY)", path), errno);
    }
    if (S_ISREG(info.st_mode) && (info.st_mode & 077) == 0) return;
    throw Error(
        Code::permission,
        fmt::format("the TLS key '{}' (TESSERA_TLS_KEY) must be a regular file that others cannot read, but has "
                    "mode {:04o}; run chmod 600 on it",
                    path, info.st_mode & 07777));
}

// Reads and writes a socket; `write` to one whose peer has gone must not raise SIGPIPE.
struct Wire {
    int socket;
    int failure = 0;  // errno of the last operation; ECONNRESET: the peer has ended the connection
};

bool later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

int wire_write(BIO* bio, const char* bytes, int size) {
    auto& wire = *static_cast<Wire*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    const ssize_t sent = ::send(wire.socket, bytes, static_cast<size_t>(size), MSG_NOSIGNAL);
    if (sent >= 0) return static_cast<int>(sent);
    if (later(errno)) {
        BIO_set_retry_write(bio);
    } else {
        wire.failure = errno;
    }
    return -1;
}

int wire_read(BIO* bio, char* bytes, int size) {
    auto& wire = *static_cast<Wire*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    const ssize_t got = ::recv(wire.socket, bytes, static_cast<size_t>(size), 0);
    if (got > 0) return static_cast<int>(got);
    if (got < 0 && later(errno)) {
        BIO_set_retry_read(bio);
    } else {
        wire.failure = got == 0 ? ECONNRESET : errno;
    }
    return -1;
}

long wire_control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

int wire_create(BIO* bio) {
    BIO_set_init(bio, 1);
    return 1;
}

const BIO_METHOD* wire_method() {
    static BIO_METHOD* const method = [] {
        BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "tessera");
        if (made == nullptr || BIO_meth_set_write(made, wire_write) != 1 || BIO_meth_set_read(made, wire_read) != 1 ||
            BIO_meth_set_ctrl(made, wire_control) != 1 || BIO_meth_set_create(made, wire_create) != 1) {
            throw broken("make a BIO method");
        }
        return made;
    }();
    return method;
}

}  // namespace

TlsOptions TlsOptions::from_environment() {
    TlsOptions options;
    const std::string text = env_text("TESSERA_TLS").value_or("");
    options.authority = env_text("TESSERA_TLS_CA").value_or("");
    options.certificate = env_text("TESSERA_TLS_CERT").value_or("");
    options.key = env_text("TESSERA_TLS_KEY").value_or("");
    if (text != "psk" && !text.empty() && !env_flag("TESSERA_TLS")) return {};
    const int given = static_cast<int>(!options.authority.empty()) + static_cast<int>(!options.certificate.empty()) +
                      static_cast<int>(!options.key.empty());
    if (text == "psk" || (given == 0 && !text.empty())) {
        options.kind = Kind::token;
    } else if (given == 3) {
        options.kind = Kind::certificates;
    } else if (given > 0) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} of TESSERA_TLS_CA, TESSERA_TLS_CERT and TESSERA_TLS_KEY are set; set all three, or "
                                "none to make the key from the job token",
                                given));
    }
    return options;
}

class TlsContext {
   public:
    TlsContext(const TlsOptions& options, const Token& token, const std::array<uint8_t, 32>& job, uint64_t epoch)
        : context_(SSL_CTX_new_ex(library(), nullptr, TLS_method())), bytes_per_key_(options.bytes_per_key) {
        SSL_CTX* const context = context_.get();
        if (context == nullptr || SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
            SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) != 1 ||
            SSL_CTX_set_ciphersuites(context, suite) != 1 || SSL_CTX_set1_groups_list(context, groups) != 1 ||
            SSL_CTX_set_num_tickets(context, 0) != 1) {
            throw broken("set up TLS 1.3");
        }
        SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION);
        SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
        SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
        // Without this, OpenSSL asks the terminal for the password of a key.
        SSL_CTX_set_default_passwd_cb(context, [](char*, int, int, void*) { return 0; });
        // A peer without the key has no certificate that an empty list of authorities accepts.
        SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
        (void)SSL_CTX_set_session_id_context(context, place, sizeof place);
        SSL_CTX_set_app_data(context, this);
        if (options.kind == TlsOptions::Kind::certificates) {
            load(options);
            return;
        }
        std::string hex;
        for (const uint8_t byte : job) hex += fmt::format("{:02x}", byte);
        identity_ = fmt::format("tessera store 1 job {} epoch {}", hex, epoch);
        key_ = derive(token, identity_);
        SSL_CTX_set_psk_use_session_callback(context, offer);
        SSL_CTX_set_psk_find_session_callback(context, find);
    }
    ~TlsContext() { OPENSSL_cleanse(key_.data(), key_.size()); }
    TlsContext(const TlsContext&) = delete;
    TlsContext& operator=(const TlsContext&) = delete;

    [[nodiscard]] SSL_CTX* get() const { return context_.get(); }
    [[nodiscard]] bool by_key() const { return !identity_.empty(); }
    [[nodiscard]] uint64_t bytes_per_key() const { return bytes_per_key_; }

   private:
    void load(const TlsOptions& options) {
        SSL_CTX* const context = context_.get();
        const auto refuse = [](const char* what, const std::string& path) {
            return Error(Code::invalid_argument, fmt::format("cannot use {} '{}': {}", what, path, reason()));
        };
        for (const std::string& path : {options.authority, options.certificate}) {
            if (::access(path.c_str(), R_OK) != 0) throw os_error(fmt::format("cannot read '{}' for TLS", path), errno);
        }
        check_private(options.key);
        ERR_clear_error();
        if (SSL_CTX_load_verify_file(context, options.authority.c_str()) != 1) {
            throw refuse("the certificates of the authority (TESSERA_TLS_CA)", options.authority);
        }
        if (SSL_CTX_use_certificate_chain_file(context, options.certificate.c_str()) != 1) {
            throw refuse("the certificate (TESSERA_TLS_CERT)", options.certificate);
        }
        if (SSL_CTX_use_PrivateKey_file(context, options.key.c_str(), SSL_FILETYPE_PEM) != 1) {
            throw refuse("the key (TESSERA_TLS_KEY)", options.key);
        }
    }

    static const TlsContext& of(SSL* ssl) {
        return *static_cast<const TlsContext*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl)));
    }

    // An external key is a session that never was.
    [[nodiscard]] Session session(SSL* ssl) const {
        Session made(SSL_SESSION_new());
        const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, suite_number);
        if (made == nullptr || cipher == nullptr ||
            SSL_SESSION_set1_master_key(made.get(), key_.data(), key_.size()) != 1 ||
            SSL_SESSION_set_cipher(made.get(), cipher) != 1 ||
            SSL_SESSION_set1_id_context(made.get(), place, sizeof place) != 1 ||
            SSL_SESSION_set_protocol_version(made.get(), TLS1_3_VERSION) != 1) {
            return nullptr;
        }
        return made;
    }

    static int offer(SSL* ssl, const EVP_MD*, const unsigned char** identity, size_t* size, SSL_SESSION** out) {
        const TlsContext& self = of(ssl);
        *identity = reinterpret_cast<const unsigned char*>(self.identity_.data());
        *size = self.identity_.size();
        *out = self.session(ssl).release();
        return *out != nullptr ? 1 : 0;
    }

    static int find(SSL* ssl, const unsigned char* identity, size_t size, SSL_SESSION** out) {
        const TlsContext& self = of(ssl);
        *out = nullptr;
        if (std::string_view(reinterpret_cast<const char*>(identity), size) != self.identity_) return 1;
        *out = self.session(ssl).release();
        return *out != nullptr ? 1 : 0;
    }

    std::unique_ptr<SSL_CTX, Free<SSL_CTX_free>> context_;
    uint64_t bytes_per_key_;
    std::string identity_;  // empty: certificates
    std::array<uint8_t, psk_size> key_{};
};

std::shared_ptr<const TlsContext> make_tls(const TlsOptions& options, const Token& token,
                                           const std::array<uint8_t, 32>& job, uint64_t epoch) {
    return std::make_shared<const TlsContext>(options, token, job, epoch);
}

struct Tls::State {
    std::unique_ptr<SSL, Free<SSL_free>> ssl;
    Wire wire;
    bool by_key;
};

Tls::Tls(const TlsContext& context, End end, int socket, std::string peer)
    : state_(new State{std::unique_ptr<SSL, Free<SSL_free>>(SSL_new(context.get())), {socket}, context.by_key()}),
      peer_(std::move(peer)),
      wants_(POLLIN),
      bytes_per_key_(context.bytes_per_key()) {
    SSL* const ssl = state_->ssl.get();
    BIO* const bio = ssl != nullptr ? BIO_new(wire_method()) : nullptr;
    if (bio == nullptr) throw broken("start TLS");
    BIO_set_data(bio, &state_->wire);
    SSL_set_bio(ssl, bio, bio);
    if (end == End::client) {
        SSL_set_connect_state(ssl);
    } else {
        SSL_set_accept_state(ssl);
    }
}

Tls::~Tls() = default;

// Sets `wants_`, or throws why no byte will move any more.
void Tls::stalled(int result) {
    switch (SSL_get_error(state_->ssl.get(), result)) {
        case SSL_ERROR_WANT_READ: wants_ = POLLIN; return;
        case SSL_ERROR_WANT_WRITE: wants_ = POLLOUT; return;
        case SSL_ERROR_SSL: break;
        default:
            throw os_error(fmt::format("the connection to {}", peer_),
                           state_->wire.failure != 0 ? state_->wire.failure : ECONNRESET);
    }
    const std::string why = reason();
    const long verdict = SSL_get_verify_result(state_->ssl.get());
    std::string detail;
    if (verdict != X509_V_OK && verdict != X509_V_ERR_UNSPECIFIED)
        detail = fmt::format(" ({})", X509_verify_cert_error_string(verdict));
    if (!shaken_) {
        throw Error(
            Code::permission,
            fmt::format("TLS with {} failed: {}{}; check that both sides have certificates of the same authority "
                        "(TESSERA_TLS_CA) that are valid now, or the same job token",
                        peer_, why, detail));
    }
    throw Error(Code::corrupt, fmt::format("the encrypted connection to {} is broken: {}{}", peer_, why, detail));
}

bool Tls::shake() {
    if (shaken_) return true;
    ERR_clear_error();
    state_->wire.failure = 0;
    const int result = SSL_do_handshake(state_->ssl.get());
    if (result != 1) {
        stalled(result);
        return false;
    }
    SSL* const ssl = state_->ssl.get();
    if (SSL_version(ssl) != TLS1_3_VERSION || (SSL_session_reused(ssl) == 1) != state_->by_key) {
        throw Error(Code::permission,
                    fmt::format("TLS with {} used neither the key of this job nor certificates as agreed", peer_));
    }
    wants_ = POLLIN;
    return true;
}

size_t Tls::read(char* bytes, size_t size) {
    ERR_clear_error();
    state_->wire.failure = 0;
    size_t got = 0;
    const int result = SSL_read_ex(state_->ssl.get(), bytes, size, &got);
    if (result != 1) {
        stalled(result);
        return 0;
    }
    shaken_ = true;  // with TLS 1.3 a client learns only now whether the server took its certificate
    wants_ = POLLIN;
    return got;
}

bool Tls::has_bytes() {
    ERR_clear_error();
    state_->wire.failure = 0;
    char byte;
    size_t got = 0;
    const int result = SSL_peek_ex(state_->ssl.get(), &byte, 1, &got);
    if (result != 1) stalled(result);
    return result == 1;
}

size_t Tls::write(const char* bytes, size_t size) {
    ERR_clear_error();
    state_->wire.failure = 0;
    size_t sent = 0;
    const int result = SSL_write_ex(state_->ssl.get(), bytes, size, &sent);
    if (result != 1) {
        stalled(result);
        return 0;
    }
    wants_ = POLLIN;
    written_ += sent;
    if (written_ >= bytes_per_key_) {
        if (SSL_key_update(state_->ssl.get(), SSL_KEY_UPDATE_NOT_REQUESTED) != 1) throw broken("change a key");
        written_ = 0;
    }
    return sent;
}

std::string Tls::exported() const {
    constexpr std::string_view label = "EXPORTER-tessera-store";
    std::string bytes(32, '\0');
    if (SSL_export_keying_material(state_->ssl.get(), reinterpret_cast<unsigned char*>(bytes.data()), bytes.size(),
                                   label.data(), label.size(), nullptr, 0, 0) != 1) {
        throw broken("export keying material");
    }
    return bytes;
}

}  // namespace tsr
