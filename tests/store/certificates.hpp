// Certificates for tests: authorities, and what they sign.
#pragma once

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>

#include "store/tls.hpp"

namespace tsr::testing {

class Authority {
   public:
    // Its files go into `directory`.
    Authority(std::string directory, const std::string& name)
        : directory_(std::move(directory)),
          name_(name),
          key_(make_key()),
          own_(sign(name, key_.get(), -3600, 3600, nullptr)) {
        write(file("pem"), [&](FILE* to) { return PEM_write_X509(to, own_.get()); });
    }

    // A chain and a key that this authority signed, valid from and to so many seconds from now.
    [[nodiscard]] TlsOptions issue(const std::string& name, long from = -3600, long to = 3600) const {
        const Key key = make_key();
        const Certificate certificate = sign(name, key.get(), from, to, own_.get());
        TlsOptions options;
        options.kind = TlsOptions::Kind::certificates;
        options.authority = file("pem");
        options.certificate = file(name + ".pem");
        options.key = file(name + ".key");
        write(options.certificate, [&](FILE* to_file) { return PEM_write_X509(to_file, certificate.get()); });
        write(options.key, [&](FILE* to_file) {
            return PEM_write_PrivateKey(to_file, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
        });
        ::chmod(options.key.c_str(), 0600);
        return options;
    }

    [[nodiscard]] std::string file(const std::string& ending) const { return directory_ + "/" + name_ + "-" + ending; }

   private:
    template <auto free>
    struct Free {
        template <class T>
        void operator()(T* object) const {
            free(object);
        }
    };
    using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY_free>>;
    using Certificate = std::unique_ptr<X509, Free<X509_free>>;

    static Key make_key() { return Key(EVP_EC_gen("P-256")); }

    // By the key of this authority. Without an issuer it is that authority's own.
    [[nodiscard]] Certificate sign(const std::string& subject, EVP_PKEY* key, long from, long to, X509* issuer) const {
        static long serial = 0;
        Certificate made(X509_new());
        X509* const x = made.get();
        X509_set_version(x, 2);
        ASN1_INTEGER_set(X509_get_serialNumber(x), ++serial);
        X509_gmtime_adj(X509_getm_notBefore(x), from);
        X509_gmtime_adj(X509_getm_notAfter(x), to);
        X509_set_pubkey(x, key);
        X509_NAME_add_entry_by_txt(X509_get_subject_name(x), "CN", MBSTRING_UTF8,
                                   reinterpret_cast<const unsigned char*>(subject.data()),
                                   static_cast<int>(subject.size()), -1, 0);
        X509_set_issuer_name(x, X509_get_subject_name(issuer != nullptr ? issuer : x));
        if (issuer == nullptr) {
            const std::unique_ptr<X509_EXTENSION, Free<X509_EXTENSION_free>> is_authority(
                X509V3_EXT_conf_nid(nullptr, nullptr, NID_basic_constraints, "critical,CA:TRUE"));
            X509_add_ext(x, is_authority.get(), -1);
        }
        if (X509_sign(x, key_.get(), EVP_sha256()) == 0) throw std::runtime_error("cannot sign a certificate");
        return made;
    }

    template <class Body>
    static void write(const std::string& path, Body&& body) {
        FILE* const to = std::fopen(path.c_str(), "w");
        if (to == nullptr || body(to) != 1) throw std::runtime_error("cannot write " + path);
        std::fclose(to);
    }

    std::string directory_;
    std::string name_;
    Key key_;
    Certificate own_;
};

}  // namespace tsr::testing
