#include "launch/contacts.hpp"

#include <fmt/core.h>

#include <utility>

#include "base/error.hpp"

namespace tsr {

Contacts::Contacts(std::map<int, Address> seats, const handshake::Party& party, milliseconds silence)
    : seats_(std::move(seats)), party_(party), silence_(silence) {
    for (const auto& [seat, address] : seats_) contacts_[seat].since = Clock::now() - pause;
}

void Contacts::append_polls(std::vector<pollfd>& polls) const {
    for (const auto& [seat, contact] : contacts_) {
        if (contact.opening) polls.push_back({contact.opening->fd(), contact.opening->wants(), 0});
        if (contact.link) polls.push_back(contact.link->poll_entry());
    }
}

void Contacts::fail(Contact& contact, std::string why) {
    contact = {std::nullopt, std::nullopt, Clock::now()};
    why_ = std::move(why);
}

std::vector<Contacts::News> Contacts::turn() {
    std::vector<News> all;
    for (auto& [seat, contact] : contacts_) {
        const Address& address = seats_.at(seat);
        News news{seat, false, {}};
        try {
            if (!contact.opening && !contact.link && Clock::now() - contact.since >= pause) {
                contact.since = Clock::now();
                contact.opening.emplace(
                    Channel::to_server(begin_connecting(address, attempts_[seat]++), party_, address.uri()));
            }
            if (contact.opening && contact.opening->shake()) {
                contact.link.emplace(std::move(*contact.opening));
                contact.opening.reset();
                news.opened = true;
            } else if (contact.opening && Clock::now() - contact.since > open_deadline) {
                fail(contact, fmt::format("{} does not answer", address.uri()));
            }
        } catch (const Error& error) {
            fail(contact, error.what());
        }
        if (contact.link) {
            contact.link->write_some();
            news.messages = contact.link->receive();
            if (!contact.link->ended() && Clock::now() - contact.link->heard() > silence_) {
                contact.link->end("it is silent");
            }
            if (contact.link->ended()) fail(contact, fmt::format("{}: {}", address.uri(), contact.link->why()));
        }
        if (news.opened || !news.messages.empty()) all.push_back(std::move(news));
    }
    return all;
}

void Contacts::send(int seat, std::string_view message) {
    if (Contact& contact = contacts_.at(seat); contact.link) contact.link->send(message);
}

void Contacts::send_all(std::string_view message) {
    for (const auto& [seat, address] : seats_) send(seat, message);
}

int Contacts::socket(int seat) const {
    const Contact& contact = contacts_.at(seat);
    return contact.link ? contact.link->socket() : -1;
}

void Contacts::drop(int seat) { contacts_.at(seat) = {std::nullopt, std::nullopt, Clock::now()}; }

NodeLink Contacts::take(int seat) {
    NodeLink link = std::move(*contacts_.at(seat).link);
    drop(seat);
    return link;
}

}  // namespace tsr
