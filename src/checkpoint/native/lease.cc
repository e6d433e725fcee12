#include "checkpoint/native/lease.hpp"

#include <fmt/format.h>
#include <openssl/rand.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <sstream>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "base/log.hpp"

namespace tsr {

namespace {

std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

std::string link_target(const char* path) {
    std::array<char, 128> target{};
    const ssize_t n = ::readlink(path, target.data(), target.size());
    return n > 0 ? std::string(target.data(), static_cast<size_t>(n)) : "";
}

// Field 22 of /proc/<pid>/stat; 0 if there is no such process, or one that is dead and only not yet reaped.
int64_t start_time_of(int64_t pid) {
    const std::string line = first_line(fmt::format("/proc/{}/stat", pid));
    const size_t name_end = line.rfind(')');  // the name may hold spaces and parentheses
    if (name_end == std::string::npos) return 0;
    std::istringstream fields(line.substr(name_end + 1));
    std::string field;
    for (int i = 3; i <= 22; ++i) {
        fields >> field;
        if (i == 3 && (field == "Z" || field == "X")) return 0;
    }
    int64_t ticks = 0;
    std::from_chars(field.data(), field.data() + field.size(), ticks);
    return ticks;
}

// The file system's own clock: clocks of two hosts may differ, this file's may not.
int64_t now_on(FileSystem& files, const std::string& beside, const std::string& id) {
    const std::string probe = fmt::format("{}.probe-{}", beside, id);
    (void)files.remove_file(probe);
    FileStatus status;
    {
        std::unique_ptr<File> file;
        if (files.open(probe, OpenMode::create, file) < 0 || file->sync() < 0) return 0;
    }
    const int64_t found = files.status(probe, status);
    (void)files.remove_file(probe);
    return found < 0 ? 0 : status.modified_ns;
}

}  // namespace

std::string random_id() {
    std::array<unsigned char, 16> bytes{};
    if (RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) != 1) {
        throw Error(Code::internal, "no random numbers to be had");
    }
    std::string text;
    for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
    return text;
}

std::string random_uuid() {
    std::string digits = random_id();
    digits[12] = '4';
    digits[16] = "89ab"[static_cast<size_t>(digits[16]) % 4];
    return fmt::format("{}-{}-{}-{}-{}", digits.substr(0, 8), digits.substr(8, 4), digits.substr(12, 4),
                       digits.substr(16, 4), digits.substr(20));
}

Holder Holder::this_process(std::string id) {
    Holder holder;
    holder.id = std::move(id);
    std::array<char, 256> host{};
    if (::gethostname(host.data(), host.size() - 1) == 0) holder.host = host.data();
    if (!is_utf8(holder.host)) holder.host.assign(1, '?');
    holder.machine =
        fmt::format("{} {}", first_line("/proc/sys/kernel/random/boot_id"), link_target("/proc/self/ns/pid"));
    holder.pid = ::getpid();
    holder.start_time = start_time_of(holder.pid);
    return holder;
}

Holder Holder::parse(std::string_view text) {
    const Json json = Json::parse(text, "a lease");
    return {json.at("id").as_string(), json.at("host").as_string(), json.at("machine").as_string(),
            json.at("pid").as_int(), json.at("start_time").as_int()};
}

std::string Holder::dump() const {
    Json json;
    json.set("id", id);
    json.set("host", host);
    json.set("pid", pid);
    json.set("start_time", start_time);
    json.set("machine", machine);
    return json.dump() + "\n";
}

bool is_live(FileSystem& files, const std::string& path, const Holder& holder, const LeaseTimes& times) {
    const Holder self = Holder::this_process("");
    if (holder.machine == self.machine && holder.start_time != 0) return start_time_of(holder.pid) == holder.start_time;
    FileStatus status;
    const int64_t found = files.status(path, status);
    if (found == -ENOENT) return false;
    if (found < 0) return true;  // in doubt it lives
    const int64_t now = now_on(files, path, random_id());
    if (now == 0 || status.modified_ns == 0) return true;
    return now - status.modified_ns < std::chrono::nanoseconds(times.span).count();
}

namespace {

Holder holder_of(std::string_view text) {
    try {
        return Holder::parse(text);
    } catch (const Error&) {
        return {"", "unknown host", "", 0, 0};  // unreadable: judged by its age alone
    }
}

Error held_by(const std::string& root, const Holder& holder) {
    return Error(Code::invalid_state, fmt::format("another live job saves into {}: process {} on {}; give each job a "
                                                  "root of its own, or stop that one",
                                                  root, holder.pid, holder.host));
}

}  // namespace

void check_not_held(FileSystem& files, const std::string& root, const LeaseTimes& times) {
    const std::string path = join(root, owner_name);
    if (!exists(files, path)) return;
    const Holder holder = holder_of(read_text(files, path, max_lease_bytes));
    if (is_live(files, path, holder, times)) throw held_by(root, holder);
}

Lease::Lease(FileSystem& files, const std::string& root, std::string id, const LeaseTimes& times)
    : files_(files), path_(join(root, owner_name)), self_(Holder::this_process(std::move(id))), times_(times) {
    acquire();
    renewer_ = std::thread([this] { renew(); });
}

void Lease::acquire() {
    const std::string mine = fmt::format("{}.{}", path_, self_.id);
    write_new_text(files_, mine, self_.dump());
    const auto give_up = [&](const Error& error) {
        (void)files_.remove_file(mine);
        throw Error(error);
    };
    // Each round either links our file into place, or finds a live holder, or removes one dead lease.
    for (int round = 0; round < 1000; ++round) {
        const int64_t linked = files_.link(mine, path_);
        if (linked == 0) {
            (void)files_.remove_file(mine);
            remove_old_attempts();
            return;  // without an fsync: whom a power loss takes this file from is dead
        }
        if (linked != -EEXIST) {
            give_up(os_error(fmt::format("cannot create {}", path_), static_cast<int>(-linked)));
        }
        std::string text;
        try {
            text = read_text(files_, path_, max_lease_bytes);
        } catch (const Error& error) {
            if (error.code() == Code::not_found) continue;
            if (error.code() != Code::corrupt) give_up(error);
        }
        const Holder holder = holder_of(text);
        if (holder.id == self_.id) {  // put, though the answer was lost and the storage's client asked again
            (void)files_.remove_file(mine);
            return;
        }
        if (is_live(files_, path_, holder, times_)) give_up(held_by(parent_of(path_), holder));
        // Many savers may find the same dead lease. Whoever links the mark of this very text may remove it, if it still
        // stands: so nobody removes the lease of one that was quicker.
        const std::string mark = fmt::format("{}.stale-{}", path_, hex8(crc32c(text)));
        const int64_t marked = files_.link(mine, mark);
        if (marked == -EEXIST) {
            remove_if_dead(mark);
            std::this_thread::sleep_for(std::chrono::milliseconds{1});
            continue;
        }
        if (marked != 0) give_up(os_error(fmt::format("cannot create {}", mark), static_cast<int>(-marked)));
        std::string standing;
        try {
            standing = read_text(files_, path_, max_lease_bytes);
        } catch (const Error&) {
            standing.clear();
        }
        if (standing == text && files_.remove_file(path_) == 0) {
            log::info("took over {} from process {} on {}, which is gone", path_, holder.pid, holder.host);
        }
        (void)files_.remove_file(mark);
    }
    give_up(Error(Code::invalid_state, fmt::format("could not take {}: others keep taking it", path_)));
}

// The mark of a saver that died between two lines of acquire().
void Lease::remove_if_dead(const std::string& mark) {
    try {
        const Holder holder = Holder::parse(read_text(files_, mark, max_lease_bytes));
        if (!is_live(files_, mark, holder, times_)) (void)files_.remove_file(mark);
    } catch (const Error&) {
        return;  // it is gone, or is looked at again
    }
}

// Files of savers that died while they tried to get the lease; one that tries right now is younger than a span.
void Lease::remove_old_attempts() {
    FileStatus own;
    std::vector<std::string> names;
    const std::string root = parent_of(path_);
    if (files_.status(path_, own) < 0 || files_.list(root, names) < 0) return;
    const std::string begin = fmt::format("{}.", owner_name);
    for (const std::string& name : names) {
        FileStatus status;
        if (!name.starts_with(begin) || files_.status(join(root, name), status) < 0) continue;
        const std::chrono::nanoseconds age(own.modified_ns - status.modified_ns);
        if (age > times_.span) (void)files_.remove_file(join(root, name));
    }
}

void Lease::renew() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
        stop_changed_.wait_for(lock, times_.renew);
        if (stop_) return;
        if (files_.touch(path_) < 0) log::warning("cannot renew {}", path_);
    }
}

void Lease::check() const {
    std::string id;
    try {
        id = Holder::parse(read_text(files_, path_, max_lease_bytes)).id;
    } catch (const Error& error) {
        if (error.code() != Code::not_found && error.code() != Code::corrupt) throw;  // it may still be ours
        throw Error(Code::invalid_state, fmt::format("{} is gone or damaged: another job may save here", path_))
            .caused_by(error);
    }
    if (id == self_.id) return;
    throw Error(Code::invalid_state,
                fmt::format("{} was taken over by another job; this one must not save here", path_));
}

Lease::~Lease() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    stop_changed_.notify_all();
    if (renewer_.joinable()) renewer_.join();
    try {
        check();
        (void)files_.remove_file(path_);
    } catch (const Error&) {
        // Another's by now, or unreadable: left as it is.
    }
}

}  // namespace tsr
