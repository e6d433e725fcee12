// tessera/store.h: the key-value store and its server.
#include "tessera/store.h"

#include "guard.hpp"
#include "handles.hpp"
#include "store/server.hpp"
#include "store/store.hpp"

namespace tsr::capi {

namespace {

tsr_store_options default_options() {
    const StoreOptions defaults = StoreOptions::from_environment();
    tsr_store_options options{};
    options.struct_size = sizeof options;
    options.timeout_ms = static_cast<int32_t>(defaults.timeout.count());
    options.insecure = defaults.insecure ? 1 : 0;
    options.epoch = defaults.epoch;
    return options;
}

StoreOptions core_options(const tsr_store_options* from) {
    const tsr_store_options given = options_in(from, default_options(), "options");
    if (given.timeout_ms <= 0) {
        throw Error(Code::invalid_argument, fmt::format("the timeout is {} ms; it must be positive", given.timeout_ms));
    }
    StoreOptions options = StoreOptions::from_environment();
    options.timeout = milliseconds{given.timeout_ms};
    options.insecure = given.insecure != 0;
    options.epoch = given.epoch;
    if (given.token != nullptr) options.token = given.token;
    if (given.job_id != nullptr) options.job_id = given.job_id;
    return options;
}

Store& store_of(const tsr_store* store) { return *object_of(store, "store"); }

std::string_view bytes_in(const void* data, size_t size, const char* what) {
    if (size > 0) return {static_cast<const char*>(&required(static_cast<const char*>(data), what)), size};
    return {};
}

void value_out(const std::string& value, void* buffer, size_t capacity, size_t* size) {
    required(size, "size") = value.size();
    if (capacity > 0) required(static_cast<char*>(buffer), "value");
    if (capacity >= value.size() && !value.empty()) std::memcpy(buffer, value.data(), value.size());
}

}  // namespace

extern "C" {

tsr_status tsr_store_options_init(tsr_store_options* options, size_t struct_size) {
    return guard([&] {
        const tsr_store_options defaults = default_options();
        write_options(options, struct_size, &defaults, sizeof defaults, "options");
    });
}

tsr_status tsr_store_serve(const char* host, uint16_t port, const tsr_store_options* options, tsr_store_server** out) {
    return guard(
        [&] { create(out, [&] { return StoreServer::start(text(host, "host"), port, core_options(options)); }); });
}

tsr_status tsr_store_server_port(const tsr_store_server* server, uint16_t* port) {
    return guard([&] { required(port, "port") = object_of(server, "server")->port(); });
}

void tsr_store_server_destroy(tsr_store_server* server) { destroy(server); }

tsr_status tsr_store_open(const char* uri, const tsr_store_options* options, tsr_store** out) {
    return guard([&] { create(out, [&] { return Store::open(text(uri, "uri"), core_options(options)); }); });
}

void tsr_store_destroy(tsr_store* store) { destroy(store); }

tsr_status tsr_store_set(const tsr_store* store, const char* key, const void* value, size_t size) {
    return guard([&] {
        Store& s = store_of(store);
        s.set(text(key, "key"), bytes_in(value, size, "value"), s.default_deadline());
    });
}

tsr_status tsr_store_get(const tsr_store* store, const char* key, void* value, size_t capacity, size_t* size) {
    return guard([&] {
        Store& s = store_of(store);
        const auto found = s.get(text(key, "key"), s.default_deadline());
        if (!found) throw Error(Code::not_found, fmt::format("the store has no key '{}'", key));
        value_out(*found, value, capacity, size);
    });
}

tsr_status tsr_store_wait(const tsr_store* store, const char* key, int32_t timeout_ms) {
    return guard([&] {
        Store& s = store_of(store);
        const auto timeout = timeout_ms < 0 ? s.timeout() : milliseconds{timeout_ms};
        (void)s.wait(text(key, "key"), Deadline::in(timeout));
    });
}

tsr_status tsr_store_add(const tsr_store* store, const char* key, int64_t delta, int64_t* result) {
    return guard([&] {
        Store& s = store_of(store);
        const int64_t sum = s.add(text(key, "key"), delta, s.default_deadline());
        if (result != nullptr) *result = sum;
    });
}

tsr_status tsr_store_compare_set(const tsr_store* store, const char* key, const void* expected, size_t expected_size,
                                 const void* desired, size_t desired_size, int32_t* swapped) {
    return guard([&] {
        Store& s = store_of(store);
        std::optional<std::string_view> wanted;
        if (expected != nullptr) wanted.emplace(static_cast<const char*>(expected), expected_size);
        int32_t& result = required(swapped, "swapped");
        result =
            s.compare_set(text(key, "key"), wanted, bytes_in(desired, desired_size, "desired"), s.default_deadline())
                ? 1
                : 0;
    });
}

tsr_status tsr_store_delete(const tsr_store* store, const char* key, int32_t* existed) {
    return guard([&] {
        Store& s = store_of(store);
        const bool was_there = s.erase(text(key, "key"), s.default_deadline());
        if (existed != nullptr) *existed = was_there ? 1 : 0;
    });
}

}  // extern "C"

}  // namespace tsr::capi
