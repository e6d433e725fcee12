// `tessera env`: what Tessera sees of this process and machine, for people and for bug reports.
#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <climits>
#include <memory>
#include <string>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "comm/host.hpp"
#include "commands.hpp"
#include "launch/environment.hpp"
#include "store/store.hpp"
#include "store/token.hpp"

namespace tsr::cli {

namespace {

std::string executable() {
    char path[PATH_MAX];
    const ssize_t size = ::readlink("/proc/self/exe", path, sizeof path);
    return size < 0 ? "" : std::string(path, static_cast<size_t>(size));
}

std::string kernel() {
    utsname name{};
    return ::uname(&name) == 0 ? fmt::format("{} {} {}", name.sysname, name.release, name.machine) : "";
}

// Where the token would come from; what is wrong otherwise. Reads only: no token is made for the asking.
std::string token_source(const JobEnvironment& job) {
    if (StoreOptions::from_environment().insecure) return "none: TESSERA_INSECURE=1";
    try {
        return find_token("", false, job.store_uri).source;
    } catch (const Error& error) {
        if (error.code() != Code::permission || env_text("TESSERA_TOKEN_FD") || env_text("TESSERA_TOKEN_FILE")) {
            return fmt::format("unusable: {}", error.what());
        }
    }
    return "the user's runtime directory, on loopback only";
}

Json gather() {
    Json facts{Json::Object{}};
    facts.set("version", TESSERA_VERSION);
    facts.set("executable", executable());
    facts.set("host", host_name());
    facts.set("kernel", kernel());
    facts.set("usable_cores", usable_cores());
    if (const auto memory = available_memory()) facts.set("available_memory_bytes", Json(*memory));
    try {
        const JobEnvironment job = JobEnvironment::detect();
        facts.set("launcher", name_of(job.launcher));
        facts.set("rank", job.rank);
        facts.set("world_size", job.world_size);
        facts.set("local_rank", job.local_rank);
        facts.set("local_world_size", job.local_world_size);
        facts.set("job_id", job.job_id);
        facts.set("epoch", Json(job.epoch));
        std::string store = job.store_uri;
        if (store.empty() && !job.candidates.empty()) {
            store = fmt::format("rank 0 serves it, at {} or one of the {} ports after it", job.candidates.front().uri(),
                                job.candidates.size() - 1);
        }
        facts.set("store", store.empty() ? "none needed" : store);
        facts.set("token", token_source(job));
    } catch (const Error& error) {
        facts.set("problem", error.what());
    }
    return facts;
}

std::string as_text(const Json& value) { return value.is(Json::Kind::string) ? value.as_string() : value.dump(); }

}  // namespace

void add_env(CLI::App& app, int& exit_code) {
    CLI::App* env = app.add_subcommand("env", "Show what Tessera sees of this process and machine");
    auto json = std::make_shared<bool>(false);
    env->add_flag("--json", *json, "one JSON object");
    env->callback([json, &exit_code] {
        const Json facts = gather();
        if (*json) {
            fmt::print("{}\n", facts.dump());
        } else {
            for (const Json::Member& fact : facts.as_object()) fmt::print("{:<24}{}\n", fact.key, as_text(fact.value));
        }
        exit_code = facts.find("problem") == nullptr ? 0 : 1;
    });
}

}  // namespace tsr::cli
