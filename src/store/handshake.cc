#include "store/handshake.hpp"

#include <fmt/core.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <cstring>
#include <span>

#include "base/error.hpp"
#include "base/random_id.hpp"

namespace tsr::handshake {

namespace {

constexpr std::string_view magic = "TSRSTORE";
constexpr std::string_view algorithm = "HMAC-SHA-256";

enum class Refusal : uint8_t { none = 0, mode = 1, version = 2 };

// What a side does in a mode, for "which {}".
std::string_view habit_of(Mode mode) {
    switch (mode) {
        case Mode::insecure: return "runs insecure, without a job token";
        case Mode::token: return "has a job token and no TLS";
        case Mode::tls_by_token: return "requires TLS with the job token (TESSERA_TLS)";
        case Mode::tls_by_certificates: return "requires TLS with certificates (TESSERA_TLS_CA, _CERT and _KEY)";
    }
    return "is of another version";
}

// What to do on the side with `mode` to meet one with `other`.
std::string_view remedy(Mode mode, Mode other) {
    if (mode == Mode::insecure) return "unset TESSERA_INSECURE here, or start the launcher with --insecure";
    switch (other) {
        case Mode::insecure: return "set TESSERA_INSECURE=1 here too, or start the store with the token";
        case Mode::token:
            return "set TESSERA_TLS=1 where the store is served too (`tessera run --encrypt`), or unset TESSERA_TLS "
                   "and "
                   "TESSERA_TLS_CA, _CERT and _KEY here";
        case Mode::tls_by_token:
            return "set TESSERA_TLS=psk here too, or the same TESSERA_TLS as here where the store is served";
        case Mode::tls_by_certificates:
            return "set TESSERA_TLS_CA, TESSERA_TLS_CERT and TESSERA_TLS_KEY here too, or the same TESSERA_TLS as here "
                   "where the store is served";
    }
    return "use the same version of Tessera everywhere";
}

// Threads of the library may use OpenSSL while the process exits, so OpenSSL must not free its locks then. A program that
// used OpenSSL before this library was loaded may have registered that cleanup already.
[[maybe_unused]] const int without_cleanup = ::OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);

Digest hmac(std::span<const uint8_t> key, std::string_view text) {
    Digest digest{};
    unsigned int size = 0;
    if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const uint8_t*>(text.data()),
             text.size(), digest.data(), &size) == nullptr ||
        size != digest.size()) {
        throw Error(Code::internal, "OpenSSL failed to compute HMAC-SHA-256");
    }
    return digest;
}

Digest sha256(std::string_view text) {
    Digest digest{};
    unsigned int size = 0;
    if (EVP_Digest(text.data(), text.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1) {
        throw Error(Code::internal, "OpenSSL failed to compute SHA-256");
    }
    return digest;
}

// Messages are written and read field by field, little-endian.
class MessageWriter {
   public:
    MessageWriter& bytes(std::string_view part) {
        text_ += part;
        return *this;
    }
    MessageWriter& digest(const Digest& part) {
        text_.append(reinterpret_cast<const char*>(part.data()), part.size());
        return *this;
    }
    template <class T>
    MessageWriter& number(T value) {
        for (size_t i = 0; i < sizeof(T); ++i) text_ += static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
        return *this;
    }
    [[nodiscard]] const std::string& text() const { return text_; }

   private:
    std::string text_;
};

class Reader {
   public:
    explicit Reader(std::string_view text) : text_(text) {}
    std::string_view bytes(size_t size) {
        const std::string_view part = text_.substr(0, size);
        text_.remove_prefix(size);
        return part;
    }
    Digest digest() {
        Digest part{};
        std::memcpy(part.data(), bytes(part.size()).data(), part.size());
        return part;
    }
    template <class T>
    T number() {
        uint64_t value = 0;
        const std::string_view part = bytes(sizeof(T));
        for (size_t i = 0; i < sizeof(T); ++i) value |= uint64_t{static_cast<uint8_t>(part[i])} << (8 * i);
        return static_cast<T>(value);
    }

   private:
    std::string_view text_;
};

struct Transcript {
    Digest job;
    uint64_t client_epoch;
    uint64_t server_epoch;
    Digest client_nonce;
    Digest server_nonce;
};

Digest mac_of(const Party& party, Role role, const Transcript& transcript) {
    if (party.insecure()) return {};
    MessageWriter text;
    text.bytes("tessera store handshake\n")
        .number(protocol_version)
        .bytes(algorithm)
        .number(static_cast<uint8_t>(role))
        .number(static_cast<uint8_t>(party.mode))
        .digest(transcript.job)
        .number(transcript.client_epoch)
        .number(transcript.server_epoch)
        .digest(transcript.client_nonce)
        .digest(transcript.server_nonce);
    return hmac(role == Role::client ? party.client_key : party.server_key, text.text());
}

bool same(const Digest& a, const Digest& b) { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

}  // namespace

Party Party::of(const StoreOptions& options, bool loopback, const std::string& address) {
    Party party;
    party.job_id = options.job_id;
    party.job = sha256(options.job_id);
    party.epoch = options.epoch;
    const TlsOptions tls = TlsOptions::from_environment();
    const bool encrypted = tls.kind != TlsOptions::Kind::off;
    if (options.insecure && encrypted) {
        throw Error(
            Code::invalid_argument,
            "TESSERA_TLS and an insecure store contradict each other: without a job token nobody knows who is at "
            "the other end; unset TESSERA_TLS, or give all ranks a token");
    }
    if (options.insecure) {
        party.mode = Mode::insecure;
        return party;
    }
    const Token token = find_token(options.token, loopback, address);
    party.token_source = token.source;
    party.client_key = hmac(token.bytes, "tessera store 1 client");
    party.server_key = hmac(token.bytes, "tessera store 1 server");
    if (encrypted) {
        party.mode = tls.kind == TlsOptions::Kind::certificates ? Mode::tls_by_certificates : Mode::tls_by_token;
        party.tls = make_tls(tls, token, party.job, party.epoch);
    }
    return party;
}

std::string binding_of(const Party& party, Role role, std::string_view exported) {
    const Digest mac = hmac(role == Role::client ? party.client_key : party.server_key,
                            MessageWriter().bytes("tessera store tls\n").bytes(exported).text());
    return MessageWriter().digest(mac).text();
}

bool is_binding_of(const Party& party, Role role, std::string_view exported, std::string_view binding) {
    const std::string expected = binding_of(party, role, exported);
    return binding.size() == expected.size() && CRYPTO_memcmp(binding.data(), expected.data(), expected.size()) == 0;
}

bool Server::plausible(std::string_view bytes) {
    const size_t known = std::min(bytes.size(), magic.size());
    return bytes.substr(0, known) == magic.substr(0, known);
}

std::string Server::answer(std::string_view hello) {
    Reader in(hello);
    (void)in.bytes(magic.size());
    const auto version = in.number<uint16_t>();
    const auto mode = in.number<uint16_t>();
    client_epoch_ = in.number<uint64_t>();
    client_job_ = in.digest();
    client_nonce_ = in.digest();
    Refusal refusal = Refusal::none;
    refusal_.clear();
    if (mode != static_cast<uint16_t>(party_.mode)) {
        refusal = Refusal::mode;
        const std::string_view habit = mode < 256 ? habit_of(static_cast<Mode>(mode)) : "is of another version";
        refusal_ = fmt::format("that process {}, but this store {}", habit, habit_of(party_.mode));
    }
    if (version != protocol_version) {
        refusal = Refusal::version;
        refusal_ = fmt::format("it uses protocol {}, this store {}", version, protocol_version);
    }
    random_bytes(server_nonce_.data(), server_nonce_.size());
    const Digest mac =
        refusal != Refusal::none
            ? Digest{}
            : mac_of(party_, Role::server, {client_job_, client_epoch_, party_.epoch, client_nonce_, server_nonce_});
    return MessageWriter()
        .bytes(magic)
        .number(protocol_version)
        .number(static_cast<uint8_t>(party_.mode))
        .number(static_cast<uint8_t>(refusal))
        .number(party_.epoch)
        .digest(server_nonce_)
        .digest(mac)
        .text();
}

Verdict Server::judge(std::string_view proof) const {
    const Digest expected =
        mac_of(party_, Role::client, {client_job_, client_epoch_, party_.epoch, client_nonce_, server_nonce_});
    if (!same(Reader(proof).digest(), expected)) return Verdict::wrong_token;
    if (!same(client_job_, party_.job)) return Verdict::other_job;
    if (client_epoch_ != party_.epoch) return Verdict::other_epoch;
    return Verdict::accepted;
}

Client::Client(const Party& party, std::string address) : party_(party), address_(std::move(address)) {
    random_bytes(nonce_.data(), nonce_.size());
}

std::string Client::hello() const {
    return MessageWriter()
        .bytes(magic)
        .number(protocol_version)
        .number(static_cast<uint16_t>(party_.mode))
        .number(party_.epoch)
        .digest(party_.job)
        .digest(nonce_)
        .text();
}

std::string Client::prove(std::string_view answer) {
    Reader in(answer);
    if (in.bytes(magic.size()) != magic) {
        throw Error(Code::version, fmt::format("the server at {} is not a Tessera store", address_));
    }
    const auto version = in.number<uint16_t>();
    const auto mode = static_cast<Mode>(in.number<uint8_t>());
    const auto refusal = static_cast<Refusal>(in.number<uint8_t>());
    server_epoch_ = in.number<uint64_t>();
    const Digest server_nonce = in.digest();
    const Digest mac = in.digest();
    if (version != protocol_version || refusal == Refusal::version) {
        throw Error(Code::version,
                    fmt::format("the store at {} uses protocol {}, but this library uses {}; use the same version of "
                                "Tessera for all ranks and the launcher",
                                address_, version, protocol_version));
    }
    if (mode != party_.mode || refusal != Refusal::none) {
        const std::string own = party_.insecure()
                                    ? "runs insecure"
                                    : fmt::format("{} (token: {})", habit_of(party_.mode), party_.token_source);
        throw Error(Code::permission, fmt::format("the store at {} {}, but this process {}; {}", address_,
                                                  party_.insecure() ? "requires a job token" : habit_of(mode), own,
                                                  remedy(party_.mode, mode)));
    }
    const Transcript transcript{party_.job, party_.epoch, server_epoch_, nonce_, server_nonce};
    if (!same(mac, mac_of(party_, Role::server, transcript))) {
        throw Error(Code::permission, fmt::format("the store at {} has a different job token than this process, which "
                                                  "got its token from {}; check that the address belongs to this job",
                                                  address_, party_.token_source));
    }
    return MessageWriter().digest(mac_of(party_, Role::client, transcript)).text();
}

void Client::accept(std::string_view verdict) const {
    switch (static_cast<Verdict>(verdict.front())) {
        case Verdict::accepted: return;
        case Verdict::other_job:
            throw Error(Code::permission,
                        fmt::format("the store at {} belongs to a job other than '{}' (TESSERA_JOB_ID)", address_,
                                    party_.job_id));
        case Verdict::other_epoch:
            throw Error(
                Code::permission,
                fmt::format("the store at {} serves epoch {} of the job, but this process belongs to epoch {}; a "
                            "process of an earlier round must exit",
                            address_, server_epoch_, party_.epoch));
        case Verdict::wrong_token: break;
    }
    throw Error(Code::permission,
                fmt::format("the store at {} rejected the job token of this process, which came from {}", address_,
                            party_.token_source));
}

}  // namespace tsr::handshake
