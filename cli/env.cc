// `tessera env`: what Tessera detects about this process and machine, for users and bug reports.
#include <fmt/core.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <climits>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/function_ref.hpp"
#include "base/json.hpp"
#include "checkpoint/io/file_system.hpp"
#include "comm/communicator.hpp"
#include "comm/device_transport.hpp"
#include "comm/host.hpp"
#include "commands.hpp"
#include "device/device.hpp"
#include "launch/environment.hpp"
#include "store/store.hpp"
#include "store/tls.hpp"
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

// Whether the store is encrypted, and where the token would come from. If it is unusable, why, and that is a problem if a join would need it. Read-only:
// never creates a token.
void add_token(Json& facts, const JobEnvironment& job) {
    switch (TlsOptions::from_environment().kind) {
        case TlsOptions::Kind::off: facts.set("tls", "off"); break;
        case TlsOptions::Kind::token: facts.set("tls", "by the job token"); break;
        case TlsOptions::Kind::certificates: facts.set("tls", "by certificates"); break;
    }
    if (StoreOptions::from_environment().insecure) {
        facts.set("token", "none: TESSERA_INSECURE=1");
        return;
    }
    try {
        facts.set("token", find_token("", false, job.store_uri).source);
    } catch (const Error& error) {
        if (error.code() == Code::permission && !env_text("TESSERA_TOKEN_FD") && !env_text("TESSERA_TOKEN_FILE")) {
            facts.set("token", "the user's runtime directory, on loopback only");
            return;
        }
        facts.set("token", fmt::format("unusable: {}", error.what()));
        if (job.world_size > 1 && !job.store_uri.starts_with("file://")) facts.set("problem", error.what());
    }
}

// Creates a communicator between two ranks of this process over the backend.
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

std::string or_why_not(FunctionRef<std::string()> fact) {
    try {
        return fact();
    } catch (const Error& error) {
        return fmt::format("unusable: {}", error.what());
    }
}

// The driver, its devices, the kernels for them and NCCL.
void add_cuda(Json& facts) {
    Json::Array devices;
    facts.set("cuda_driver", or_why_not([&] {
                  const CudaFacts found = cuda_facts();
                  for (const CudaFacts::OfDevice& one : found.devices) {
                      Json device{Json::Object{}};
                      device.set("name", one.name);
                      device.set("capability", one.capability);
                      device.set("memory_bytes", Json(static_cast<int64_t>(one.memory)));
                      Json::Array reached;
                      Json::Array links;
                      for (const CudaFacts::Link& link : one.links) {
                          Json to{Json::Object{}};
                          to.set("to", link.device);
                          to.set("rank", link.rank);
                          to.set("atomics", link.atomics);
                          reached.emplace_back(link.device);
                          links.push_back(std::move(to));
                      }
                      device.set("reaches", std::move(reached));
                      device.set("links", std::move(links));
                      devices.push_back(std::move(device));
                  }
                  return fmt::format("for CUDA {}", found.driver);
              }));
    facts.set("cuda_devices", Json(std::move(devices)));
    facts.set("cuda_kernels", or_why_not([] {
                  const CudaKernels found = cuda_kernels();
                  return fmt::format("{:016x}, for {}, {}", found.fingerprint, found.devices, found.path);
              }));
    facts.set("nccl", or_why_not([] {
                  const NcclFacts found = nccl_facts();
                  return fmt::format("{}, {}", found.version, found.path);
              }));
}

// The kernel's name for the file system type of `path`; "" if unknown.
std::string file_system_type(const std::string& path) {
    struct stat status{};
    if (::stat(path.c_str(), &status) < 0) return "";
    const std::string device = fmt::format("{}:{}", major(status.st_dev), minor(status.st_dev));
    // "36 35 98:0 /root /mount options [more] - ext4 /dev/root options"
    std::ifstream mounts("/proc/self/mountinfo");
    for (std::string line; std::getline(mounts, line);) {
        std::istringstream fields(line);
        std::string number;
        fields >> number >> number >> number;
        if (number != device) continue;
        const size_t dash = line.find(" - ");
        if (dash == std::string::npos) continue;
        return line.substr(dash + 3, line.find(' ', dash + 3) - dash - 3);
    }
    return "";
}

// The launchers whose variables are set: the first one decides.
Json launchers() {
    Json::Array all;
    for (const LauncherFound& found : launchers_found()) {
        Json variables{Json::Object{}};
        for (const auto& [name, value] : found.variables) variables.set(name, value);
        Json one{Json::Object{}};
        one.set("launcher", name_of(found.launcher));
        one.set("used", all.empty());
        one.set("variables", std::move(variables));
        all.push_back(std::move(one));
    }
    return Json(std::move(all));
}

// How a checkpoint in `directory` would be written.
void add_storage(Json& facts, const std::string& directory) {
    facts.set("directory", directory);
    facts.set("file_system", file_system_type(directory));
    struct statvfs space{};
    if (::statvfs(directory.c_str(), &space) == 0) {
        facts.set("free_bytes", Json(static_cast<int64_t>(uint64_t{space.f_bavail} * space.f_frsize)));
    }
    try {
        const WritePath path = find_write_path(posix_file_system(), directory);
        facts.set("direct_io", path.direct ? "yes" : fmt::format("no: {}", path.why));
        facts.set("writes", path.direct ? "O_DIRECT, bypassing the page cache"
                                        : "through the page cache, with concurrent write-back (sync_file_range)");
        facts.set("preallocation", path.preallocates ? "yes" : "no: fallocate is not supported");
    } catch (const Error& error) {
        facts.set("direct_io", fmt::format("unknown: {}", error.what()));
    }
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
    add_cuda(facts);
    add_storage(facts, directory);
    std::error_code unknown;
    const std::filesystem::path temporary = std::filesystem::temp_directory_path(unknown);
    if (!unknown && temporary != directory) {
        Json of_temporary{Json::Object{}};
        add_storage(of_temporary, temporary.string());
        facts.set("temporary_directory", std::move(of_temporary));
    }
    facts.set("launchers_found", launchers());
    try {
        const JobEnvironment job = JobEnvironment::detect();
        facts.set("launcher", name_of(job.launcher));
        facts.set("rank", job.rank);
        facts.set("world_size", job.world_size);
        if (job.local_world_size > 0) {
            facts.set("local_rank", job.local_rank);
            facts.set("local_world_size", job.local_world_size);
        } else {
            facts.set("local_world_size", "unknown: the ranks compare their hosts when they join");
        }
        facts.set("job_id", job.job_id);
        facts.set("epoch", Json(job.epoch));
        std::string store = job.store_uri;
        if (store.empty() && !job.candidates.empty()) {
            store = fmt::format("served by rank 0, at {} or one of the next {} ports", job.candidates.front().uri(),
                                job.candidates.size() - 1);
        }
        facts.set("store", store.empty() ? "none needed" : store);
        add_token(facts, job);
    } catch (const Error& error) {
        facts.set("problem", error.what());
    }
    return facts;
}

std::string as_text(const Json& value) {
    if (value.is(Json::Kind::string)) return value.as_string();
    std::string text;
    if (value.is(Json::Kind::array)) {
        for (const Json& one : value.as_array()) text += fmt::format("{}{}", text.empty() ? "" : "; ", as_text(one));
        return text.empty() ? "none" : text;
    }
    if (!value.is(Json::Kind::object)) return value.dump();
    for (const Json::Member& member : value.as_object()) {
        text += fmt::format("{}{} {}", text.empty() ? "" : ", ", member.key, as_text(member.value));
    }
    return text;
}

}  // namespace

void add_env(Command& tessera) {
    Command env = tessera.add_command("env", "Show what Tessera detects about this process and machine");
    auto json = std::make_shared<bool>(false);
    env.add_flag("--json", *json, "print one JSON object");
    auto directory = std::make_shared<std::string>(".");
    env.add_option("directory", *directory, "directory to test for writing checkpoints")
        .type_name("DIR")
        .default_text("current directory")
        .existing_directory();
    env.on_run([json, directory] {
        std::error_code unknown;  // a deleted directory has no path
        const std::filesystem::path path = std::filesystem::canonical(*directory, unknown);
        const Json facts = gather(unknown ? *directory : path.string());
        if (*json) {
            fmt::print("{}\n", facts.dump());
        } else {
            for (const Json::Member& fact : facts.as_object()) fmt::print("{:<24}{}\n", fact.key, as_text(fact.value));
        }
        return facts.find("problem") == nullptr ? 0 : 1;
    });
}

}  // namespace tsr::cli
