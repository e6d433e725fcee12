// `tessera env`: what Tessera sees of this process and machine, for people and for bug reports.
#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "checkpoint/io/file_system.hpp"
#include "comm/communicator.hpp"
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

// Two ranks of this process meet over it.
std::string try_transport(const std::string& backend) {
    constexpr milliseconds patience{5000};
    CommOptions options;
    options.backend = backend;
    options.timeout = patience;
    const auto store = make_memory_store(patience);
    std::string problem;
    const auto meet = [&](int rank) -> std::string {
        try {
            Communicator::create(store, rank, 2, options)->finalize();
        } catch (...) {
            return current_error().what();
        }
        return "";
    };
    std::thread other([&] { problem = meet(1); });
    const std::string own = meet(0);
    other.join();
    if (own.empty() && problem.empty()) return "usable";
    return fmt::format("unusable: {}", own.empty() ? problem : own);
}

Json transports() {
    Json found{Json::Object{}};
    for (const char* name : {"shm", "gloo"}) found.set(name, try_transport(name));
    return found;
}

// Whether a checkpoint in `directory` would bypass the page cache.
std::string try_direct_io(const std::string& directory) {
    FileSystem& files = posix_file_system();
    const std::string path = join(directory, fmt::format(".tessera-env-{}", ::getpid()));
    std::unique_ptr<File> file;
    if (const int64_t failure = files.open(path, OpenMode::create_direct, file); failure < 0) {
        return fmt::format("unknown: no file can be made there: {}", std::strerror(static_cast<int>(-failure)));
    }
    std::string answer = "no: checkpoints go through the page cache";
    const AlignedBuffer block(static_cast<size_t>(direct_alignment));
    std::memset(block.data(), 0, block.size());
    if (file->is_direct()) {
        const int64_t written = file->write(block.first(block.size()), 0);
        if (written == direct_alignment) answer = "yes";
        if (written < 0 && written != -EINVAL) {
            answer = fmt::format("unknown: writing fails: {}", std::strerror(static_cast<int>(-written)));
        }
    }
    file.reset();
    (void)files.remove_file(path);
    return answer;
}

Json gather(const std::string& directory) {
    Json facts{Json::Object{}};
    facts.set("version", TESSERA_VERSION);
    facts.set("executable", executable());
    facts.set("host", host_name());
    facts.set("kernel", kernel());
    facts.set("usable_cores", usable_cores());
    if (const auto memory = available_memory()) facts.set("available_memory_bytes", Json(*memory));
    facts.set("transports", transports());
    facts.set("directory", directory);
    facts.set("direct_io", try_direct_io(directory));
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

std::string as_text(const Json& value) {
    if (value.is(Json::Kind::string)) return value.as_string();
    if (!value.is(Json::Kind::object)) return value.dump();
    std::string text;
    for (const Json::Member& member : value.as_object()) {
        text += fmt::format("{}{} {}", text.empty() ? "" : ", ", member.key, as_text(member.value));
    }
    return text;
}

}  // namespace

void add_env(CLI::App& app, int& exit_code) {
    CLI::App* env = app.add_subcommand("env", "Show what Tessera sees of this process and machine");
    auto json = std::make_shared<bool>(false);
    env->add_flag("--json", *json, "one JSON object");
    auto directory = std::make_shared<std::string>(".");
    env->add_option("directory", *directory, "where checkpoints would be: is direct I/O possible there?")
        ->type_name("DIR")
        ->default_str("the current one")
        ->check(CLI::ExistingDirectory);
    env->callback([json, directory, &exit_code] {
        std::error_code unknown;  // one that is gone has no path
        const std::filesystem::path path = std::filesystem::canonical(*directory, unknown);
        const Json facts = gather(unknown ? *directory : path.string());
        if (*json) {
            fmt::print("{}\n", facts.dump());
        } else {
            for (const Json::Member& fact : facts.as_object()) fmt::print("{:<24}{}\n", fact.key, as_text(fact.value));
        }
        exit_code = facts.find("problem") == nullptr ? 0 : 1;
    });
}

}  // namespace tsr::cli
