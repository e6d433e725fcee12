#include "checkpoint/root/lease.hpp"

#include <fmt/core.h>
#include <openssl/evp.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/clock.hpp"
#include "base/crc32c.hpp"
#include "base/env.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/proc.hpp"
#include "base/thread.hpp"

namespace tsr {

namespace {

std::string link_target(const char* path) {
    std::array<char, 128> target{};
    const ssize_t n = ::readlink(path, target.data(), target.size());
    return n > 0 ? std::string(target.data(), static_cast<size_t>(n)) : "";
}

// The kernel passes each program 16 random bytes at its start. They protect its stack, so only their digest is
// published.
std::string digest_of_image() {
    const auto* random = reinterpret_cast<const unsigned char*>(::getauxval(AT_RANDOM));
    std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
    unsigned int size = 0;
    if (random == nullptr || EVP_Digest(random, 16, digest.data(), &size, EVP_sha256(), nullptr) != 1) return "";
    std::string text;
    for (size_t i = 0; i < 8; ++i) text += fmt::format("{:02x}", digest[i]);
    return text;
}

// Computed once, by whoever makes a saver: a save in the background may go on while the process exits, and OpenSSL may have
// been cleaned up by then. Never destroyed for the same reason.
const std::string& image_of_this_process() {
    static const auto* image = new std::string(digest_of_image());
    return *image;
}

// Word `n` of a machine's name.
std::string_view word(std::string_view machine, size_t n) {
    for (; n > 0; --n) {
        const size_t space = machine.find(' ');
        if (space == std::string_view::npos) return {};
        machine.remove_prefix(space + 1);
    }
    return machine.substr(0, machine.find(' '));
}

// The time by the file system's clock: the clocks of two hosts may differ.
std::optional<int64_t> now_on(FileSystem& files, const std::string& beside, const std::string& id) {
    const std::string probe = fmt::format("{}.probe-{}", beside, id);
    (void)files.remove_file(probe);
    FileStatus status;
    {
        std::unique_ptr<File> file;
        if (files.open(probe, OpenMode::create, file) < 0 || file->sync() < 0) return std::nullopt;
    }
    const int64_t found = files.status(probe, status);
    (void)files.remove_file(probe);
    return found < 0 ? std::nullopt : status.modified_ns;
}

}  // namespace

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
    // Of this thread, not of the process, whose first thread may have ended.
    holder.machine = fmt::format("{} {}", boot_id(), link_target("/proc/thread-self/ns/pid"));
    if (const std::string time = link_target("/proc/thread-self/ns/time"); !time.empty()) holder.machine += " " + time;
    holder.pid = ::getpid();
    holder.start_time = static_cast<int64_t>(process_start_time(holder.pid).value_or(0));
    holder.image = image_of_this_process();
    holder.job = env_text("TESSERA_JOB_ID").value_or("");
    holder.epoch = env_number("TESSERA_EPOCH", 0, INT64_MAX).value_or(0);
    return holder;
}

Holder Holder::parse(std::string_view text) {
    const Json json = Json::parse(text, "a lease");
    const Json* image = json.find("image");
    const Json* job = json.find("job");
    return {json.at("id").as_string(),
            json.at("host").as_string(),
            json.at("machine").as_string(),
            json.at("pid").as_int(),
            json.at("start_time").as_int(),
            image != nullptr ? image->as_string() : "",
            job != nullptr ? job->as_string() : "",
            job != nullptr ? json.at("epoch").as_int() : 0};
}

std::string Holder::dump() const {
    Json json;
    json.set("id", id);
    json.set("host", host);
    json.set("pid", pid);
    json.set("start_time", start_time);
    json.set("machine", machine);
    if (!image.empty()) json.set("image", image);
    if (!job.empty()) {
        json.set("job", job);
        json.set("epoch", epoch);
    }
    return json.dump() + "\n";
}

ProcessView::Look ProcessView::look(int64_t pid) const {
    if (auto stat = process_stat(pid)) return {false, stat};
    return {process_is_gone(pid), std::nullopt};
}

Sight sight_of(const Holder& holder, const ProcessView& view) {
    const Holder self = view.self();
    const std::string_view boot = word(holder.machine, 0);
    const std::string_view pids = word(holder.machine, 1);
    if (boot.empty() || word(self.machine, 0).empty()) return {Seen::not_visible, Boot::unknown};
    if (boot != word(self.machine, 0)) return {Seen::not_visible, Boot::other};
    if (pids.empty() || pids != word(self.machine, 1)) return {Seen::not_visible, Boot::same};
    const ProcessView::Look look = view.look(holder.pid);
    if (look.gone) return {Seen::dead, Boot::same};
    if (!look.stat || holder.start_time == 0 || holder.machine != self.machine) return {Seen::not_visible, Boot::same};
    if (look.stat->dead() || static_cast<int64_t>(look.stat->start_time) != holder.start_time) {
        return {Seen::dead, Boot::same};
    }
    const bool was_this_one = holder.pid == self.pid && !holder.image.empty() && !self.image.empty() &&
                              holder.image != self.image;  // before an exec, which ended its threads
    return {was_this_one ? Seen::dead : Seen::alive, Boot::same};
}

bool is_live(const Sight& sight, LeaseAge age, const LeaseTimes& times) {
    if (sight.boot == Boot::same && sight.seen == Seen::alive) return true;  // even if it is stopped and does not renew
    if (sight.boot == Boot::same && sight.seen == Seen::dead) return false;
    if (!age) return true;  // when in doubt, it is alive
    // A lease from the far future is not being renewed either: the clock was set back since.
    return *age < times.span && *age > -times.span;
}

namespace {

struct Verdict {
    bool live = true;
    bool seen = false;  // its process
    LeaseAge age;       // unless the process decides
};

Verdict judge(FileSystem& files, const std::string& path, const Holder& holder, const LeaseTimes& times,
              const ProcessView& view) {
    const Sight sight = sight_of(holder, view);
    if (sight.seen != Seen::not_visible) return {is_live(sight, std::nullopt, times), true, std::nullopt};
    FileStatus status;
    const int64_t found = files.status(path, status);
    if (found == -ENOENT) return {false, false, std::nullopt};
    LeaseAge age;
    if (found >= 0 && status.modified_ns) {
        if (const auto now = now_on(files, path, random_id())) {
            int64_t between = 0;
            const bool too_far = __builtin_sub_overflow(*now, *status.modified_ns, &between);
            age = too_far ? std::chrono::nanoseconds::max() : std::chrono::nanoseconds{between};
        }
    }
    return {is_live(sight, age, times), false, age};
}

Holder holder_of(std::string_view text) {
    try {
        return Holder::parse(text);
    } catch (const Error&) {
        return {"", "unknown host", "", 0, 0, ""};  // unreadable: judged only by its age
    }
}

// link() decides who was first. On a file system without hard links (EPERM, ENOSYS or EOPNOTSUPP) the file is created
// and then written; a reader in between finds no holder and considers the lease live while it is young.
int64_t link_or_create(FileSystem& files, const std::string& from, const std::string& to, const std::string& text) {
    const int64_t linked = files.link(from, to);
    if (linked != -EPERM && linked != -ENOSYS && linked != -EOPNOTSUPP) return linked;
    std::unique_ptr<File> file;
    if (const int64_t made = files.open(to, OpenMode::create, file); made < 0) return made;
    try {
        write_all(*file, to, std::as_bytes(std::span(text)), 0);
        sync_file(*file, to);
    } catch (...) {
        (void)files.remove_file(to);
        throw;
    }
    return 0;
}

// The host name was written by others: replaces control characters, which would garble a terminal.
std::string shown(std::string host) {
    std::replace_if(host.begin(), host.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
    return host;
}

bool is_of_earlier_round(const Holder& holder, const Holder& self) {
    return !self.job.empty() && holder.job == self.job && holder.epoch < self.epoch;
}

Error held_by(const std::string& root, const Holder& holder, const Verdict& verdict, const LeaseTimes& times) {
    const Holder self = Holder::this_process("");
    std::string advice = "give each job its own root, or stop that one";
    if (holder.machine == self.machine && holder.pid == self.pid) {
        advice = "this is the same process: close its other saver for this root first";
    } else if (verdict.age) {
        advice += fmt::format(". That process is not visible from here; if it is gone, its lease expires in {} s",
                              std::chrono::ceil<std::chrono::seconds>(times.span - *verdict.age).count());
    } else if (!verdict.seen) {
        advice += fmt::format(
            ". Neither that process nor the age of its lease is visible from here; if it is gone, remove {}",
            join(root, owner_name));
    }
    return Error(Code::invalid_state, fmt::format("another live job saves into {}: process {} on {}; {}", root,
                                                  holder.pid, shown(holder.host), advice));
}

}  // namespace

bool is_live(FileSystem& files, const std::string& path, const Holder& holder, const LeaseTimes& times,
             const ProcessView& view) {
    return judge(files, path, holder, times, view).live;
}

void check_not_held(FileSystem& files, const std::string& root, const LeaseTimes& times) {
    const std::string path = join(root, owner_name);
    if (!exists(files, path)) return;
    const Holder holder = holder_of(read_text(files, path, max_lease_bytes));
    const Verdict verdict = judge(files, path, holder, times, {});
    if (verdict.live) throw held_by(root, holder, verdict, times);
}

Lease::Lease(FileSystem& files, const std::string& root, std::string id, const LeaseTimes& times)
    : files_(files), path_(join(root, owner_name)), self_(Holder::this_process(std::move(id))), times_(times) {
    acquire(HeldDirectory(files, root).files());
    renewer_ = start_thread("tsr-lease", [this] { renew(); });
}

void Lease::acquire(FileSystem& files) {
    const std::string mine = fmt::format("{}.{}", path_, self_.id);
    write_new_text(files, mine, self_.dump());
    const auto give_up = [&](const Error& error) {
        (void)files.remove_file(mine);
        throw Error(error);
    };
    const auto put = [&](const std::string& to) {
        try {
            return link_or_create(files, mine, to, self_.dump());
        } catch (const Error& error) {
            give_up(error);
        }
        return int64_t{0};
    };
    std::optional<Deadline> expiry;  // of the lease of an earlier round, if it is not renewed
    // Each round either links our file into place, or finds a live holder, or removes one dead lease.
    for (int round = 0; round < 1000; ++round) {
        const int64_t linked = put(path_);
        if (linked == 0) {
            (void)files.remove_file(mine);
            remove_old_attempts(files);
            return;  // without an fsync: after a power loss its holder is dead
        }
        if (linked != -EEXIST) {
            give_up(os_error(fmt::format("cannot create {}", path_), static_cast<int>(-linked)));
        }
        std::string text;
        try {
            text = read_text(files, path_, max_lease_bytes);
        } catch (const Error& error) {
            if (error.code() == Code::not_found) continue;
            if (error.code() != Code::corrupt) give_up(error);
        }
        const Holder holder = holder_of(text);
        if (holder.id == self_.id) {  // created, but the answer was lost and the storage client retried
            (void)files.remove_file(mine);
            return;
        }
        const Verdict verdict = judge(files, path_, holder, times_, {});
        if (verdict.live && !verdict.seen && is_of_earlier_round(holder, self_)) {
            if (!expiry) {
                expiry = Deadline::in(times_.span + times_.renew);
                log::warning(
                    "waiting up to {} s for {}: process {} on {} holds it, which an earlier round of this job started",
                    std::chrono::ceil<std::chrono::seconds>(times_.span).count(), path_, holder.pid,
                    shown(holder.host));
            }
            if (!expiry->expired()) {
                std::this_thread::sleep_for(times_.span / 300);
                continue;
            }
        }
        if (verdict.live) give_up(held_by(parent_of(path_), holder, verdict, times_));
        // Many savers may find the same dead lease. Only the one that links the mark of exactly this text may remove
        // it, if it is unchanged. So nobody removes the lease of a faster saver.
        const std::string mark = fmt::format("{}.stale-{}", path_, hex8(crc32c(text)));
        const int64_t marked = put(mark);
        if (marked == -EEXIST) {
            remove_if_dead(files, mark);
            std::this_thread::sleep_for(std::chrono::milliseconds{1});
            continue;
        }
        if (marked != 0) give_up(os_error(fmt::format("cannot create {}", mark), static_cast<int>(-marked)));
        std::string standing;
        try {
            standing = read_text(files, path_, max_lease_bytes);
        } catch (const Error&) {
            standing.clear();
        }
        if (standing == text && files.remove_file(path_) == 0) {
            log::info("took over {} from process {} on {}, which is gone", path_, holder.pid, shown(holder.host));
        }
        (void)files.remove_file(mark);
    }
    give_up(
        Error(Code::invalid_state,
              fmt::format("could not take the lease {}: other jobs keep taking it, or it is a dangling symbolic link",
                          path_)));
}

// Removes the mark of a saver that died within acquire().
void Lease::remove_if_dead(FileSystem& files, const std::string& mark) {
    try {
        const Holder holder = holder_of(read_text(files, mark, max_lease_bytes));
        if (!is_live(files, mark, holder, times_)) (void)files.remove_file(mark);
    } catch (const Error&) {
        return;  // it is gone, or is checked again later
    }
}

// Removes files of savers that died while they tried to get the lease; those of a running attempt are younger than the
// span.
void Lease::remove_old_attempts(FileSystem& files) {
    FileStatus own;
    std::vector<std::string> names;
    const std::string root = parent_of(path_);
    if (files.status(path_, own) < 0 || files.list(root, names) < 0) return;
    const std::string begin = fmt::format("{}.", owner_name);
    for (const std::string& name : names) {
        FileStatus status;
        if (!name.starts_with(begin) || files.status(join(root, name), status) < 0) continue;
        if (!own.modified_ns || !status.modified_ns) continue;
        const int64_t span = std::chrono::nanoseconds(times_.span).count();
        if (*status.modified_ns < *own.modified_ns - span) (void)files.remove_file(join(root, name));
    }
}

void Lease::renew() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
        stop_changed_.wait_for(lock, times_.renew);
        if (stop_) return;
        try {
            check();
        } catch (const Error& error) {
            if (error.code() != Code::invalid_state) continue;  // it may still be ours
            return log::warning("{}", error.what());            // another job's lease: do not renew it
        }
        if (files_.touch(path_) < 0) log::warning("cannot renew the lease {}", path_);
    }
}

void Lease::check(FileSystem& files) const {
    std::string id;
    try {
        id = Holder::parse(read_text(files, path_, max_lease_bytes)).id;
    } catch (const Error& error) {
        if (error.code() != Code::not_found && error.code() != Code::corrupt) throw;  // it may still be ours
        throw Error(
            Code::invalid_state,
            fmt::format("{} is gone or damaged, so another job may save here; close this saver and open a new one",
                        path_))
            .caused_by(error);
    }
    if (id == self_.id) return;
    throw Error(Code::invalid_state,
                fmt::format("{} was taken over by another job; this job must not save here", path_));
}

Lease::~Lease() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    stop_changed_.notify_all();
    if (renewer_.joinable()) renewer_.join();
    try {
        const HeldDirectory root(files_, parent_of(path_));
        check(root.files());
        (void)root.files().remove_file(path_);
    } catch (const Error&) {
        // Another job's by now, or unreadable: leave it.
    }
}

}  // namespace tsr
