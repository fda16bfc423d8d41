"""The scripts of the receipt log. Redis runs each of them as a whole, so what they check is true while they write.

`KEYS` and `ARGV` of each script are listed above it. Times are those of Redis, in milliseconds since 1970.

When the memory of Redis is used up, only savers and deliverers can make room, so their scripts must work then. Redis
refuses the first write of a script if that may need memory, and none of the following ones. So each of these scripts
begins with a write that needs none.
"""

from __future__ import annotations

from typing import Final

# Functions that several scripts use. `position` describes a consumer group: how many of its entries are pending, the
# smallest of them, and the last entry that was delivered; nil if there is no such group, or no stream.
_FUNCTIONS: Final = """
    local function position(stream, group)
        local groups = redis.pcall('XINFO', 'GROUPS', stream)
        if groups.err then return nil end
        for _, fields in ipairs(groups) do
            local found = {}
            for place = 1, #fields, 2 do found[fields[place]] = fields[place + 1] end
            if found.name == group then
                local first = found.pending > 0 and redis.call('XPENDING', stream, group)[2] or nil
                return {pending = found.pending, first = first, delivered = found['last-delivered-id']}
            end
        end
        return nil
    end
    local function last_id(stream)
        local fields = redis.pcall('XINFO', 'STREAM', stream)
        if fields.err then return '0-0' end
        for place = 1, #fields, 2 do
            if fields[place] == 'last-generated-id' then return fields[place + 1] end
        end
    end
    local function is_idle(stream, group)  -- nothing is being consumed by this group
        local found = position(stream, group)
        return found == nil or found.pending == 0
    end
    local function is_drained(stream, group)  -- nothing is left for this group
        if redis.call('XLEN', stream) == 0 then return is_idle(stream, group) end
        local found = position(stream, group)
        return found ~= nil and found.pending == 0 and found.delivered == last_id(stream)
    end
    local function redis_time()
        local time = redis.call('TIME')
        return time[1] * 1000 + math.floor(time[2] / 1000)
    end
"""

# accept: claim the id of a message and add its entry to the stream, both or neither.
# KEYS: claim, accepted stream, switches, stream to save (the accepted one if the kind has no such stream)
# ARGV: hash of the payload, `on` or `off` if no operator has set two_phase, limit of the stream, milliseconds of the
#       promise, kind, principal, id of the client, group that saves, group that delivers, then the fields of the entry
# Returns {'accepted', at, promised by}; {'known', level, at, promised by, seq, saved at}; {'conflict'}; {'full'};
#         {'save'}: save it in the ledger; {'draining'}: the same, after earlier messages of this shard have been saved
ACCEPT: Final = f"""
    {_FUNCTIONS}
    local found = redis.call('HMGET', KEYS[1], 'sha', 'level', 'at', 'promise', 'seq', 'savedAt')
    if found[1] and found[2] ~= 'rejected' then  -- what was rejected may be sent again
        if found[1] ~= ARGV[1] then return {{'conflict'}} end
        return {{'known', found[2], found[3], found[4], found[5] or '', found[6] or ''}}
    end
    if (redis.call('HGET', KEYS[3], 'two_phase') or ARGV[2]) ~= 'on' then
        local delivers = KEYS[4] ~= KEYS[2]
        local drained = is_drained(KEYS[2], ARGV[8])
        if delivers then
            if redis.call('HGET', KEYS[3], 'delivering') == 'on' then
                drained = is_drained(KEYS[2], ARGV[9]) and is_idle(KEYS[2], ARGV[8])
            else
                drained = drained and is_idle(KEYS[2], ARGV[9])
            end
            drained = drained and is_drained(KEYS[4], ARGV[8])
        end
        return {{drained and 'save' or 'draining'}}
    end
    local length = redis.call('XLEN', KEYS[2])
    if KEYS[4] ~= KEYS[2] then length = length + redis.call('XLEN', KEYS[4]) end
    if length >= tonumber(ARGV[3]) then return {{'full'}} end
    local at = redis_time()
    local promise = at + ARGV[4]
    local entry = {{}}
    for place = 10, #ARGV do entry[#entry + 1] = ARGV[place] end
    local stamp = string.format('%.0f', at)
    redis.call('XADD', KEYS[2], '*', 'createdAtMs', stamp, unpack(entry))
    redis.call('DEL', KEYS[1])
    redis.call('HSET', KEYS[1], 'sha', ARGV[1], 'level', 'accepted', 'at', stamp,
               'promise', string.format('%.0f', promise), 'kind', ARGV[5], 'principal', ARGV[6], 'client', ARGV[7])
    return {{'accepted', stamp, string.format('%.0f', promise)}}
"""

# settle: record in the claims what became of messages, and tell the users who are connected.
# KEYS: the claims
# ARGV: seconds to keep a claim; level, time, code and reason, which all of them have in common; then for each claim:
#       hash of the payload, seq, task id or empty; then pairs of a channel and a frame. A claim that is gone, or has
#       another hash, stays as it is
SETTLE: Final = """
    local seconds, level, at, code, reason = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
    local place = 6
    for _, claim in ipairs(KEYS) do
        local found = redis.call('HMGET', claim, 'sha', 'level')
        if found[1] == ARGV[place] then
            redis.call('EXPIRE', claim, seconds)  -- first: it needs no memory
            redis.call('HSET', claim, 'level', level, 'seq', ARGV[place + 1], 'savedAt', at)
            if ARGV[place + 2] ~= '' then redis.call('HSET', claim, 'task', ARGV[place + 2]) end
            if code ~= '' then
                redis.call('HSET', claim, 'code', code, 'reason', reason)
            elseif found[2] == 'rejected' then
                redis.call('HDEL', claim, 'code', 'reason')
            end
        end
        place = place + 3
    end
    for channel = place, #ARGV, 2 do redis.call('PUBLISH', ARGV[channel], ARGV[channel + 1]) end
    return #KEYS
"""

# acknowledge: acknowledge entries, and delete from the stream what every group has passed. A group of ours that is
# switched off keeps only its pending entries. `None` (false): another consumer holds the shard.
# KEYS: stream, holder, switches
# ARGV: token, our group, our other group on this stream or empty, the value of `delivering` with which the other group
#       is switched off, then the ids
ACKNOWLEDGE: Final = f"""
    {_FUNCTIONS}
    if redis.call('GET', KEYS[2]) ~= ARGV[1] then return false end
    local count = 0
    for first = 5, #ARGV, 1000 do
        count = count + redis.call('XACK', KEYS[1], ARGV[2], unpack(ARGV, first, math.min(#ARGV, first + 999)))
    end
    local function parts(id)
        local ms, number = string.match(id, '(%d+)-(%d+)')
        return tonumber(ms), tonumber(number)
    end
    local function is_before(one, other)
        local ms, number = parts(one)
        local other_ms, other_number = parts(other)
        return ms < other_ms or (ms == other_ms and number < other_number)
    end
    local lowest
    for _, fields in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
        local found = {{}}
        for place = 1, #fields, 2 do found[fields[place]] = fields[place + 1] end
        local kept
        if found.pending > 0 then
            kept = redis.call('XPENDING', KEYS[1], found.name)[2]
        elseif found.name ~= ARGV[3] or (redis.call('HGET', KEYS[3], 'delivering') or 'off') ~= ARGV[4] then
            local ms, number = parts(found['last-delivered-id'])
            kept = string.format('%.0f-%.0f', ms, number + 1)
        end
        if kept and (lowest == nil or is_before(kept, lowest)) then lowest = kept end
    end
    if lowest then redis.call('XTRIM', KEYS[1], 'MINID', lowest) end
    return count
"""

# move: add delivered messages to the stream to save, and acknowledge them, both or neither.
# KEYS: accepted stream, holder, stream to save
# ARGV: token, group that delivers, then for each entry: its id, the number of its fields and values, and these
MOVE: Final = """
    if redis.call('GET', KEYS[2]) ~= ARGV[1] then return false end
    local moved = 0
    local place = 3
    while place <= #ARGV do
        local size = tonumber(ARGV[place + 1])
        if redis.call('XACK', KEYS[1], ARGV[2], ARGV[place]) == 1 then
            redis.call('XADD', KEYS[3], '*', unpack(ARGV, place + 2, place + 1 + size))
            moved = moved + 1
        end
        place = place + 2 + size
    end
    return moved
"""

# switch: copy two_phase, and make one of two groups read the accepted stream from where the other has stopped.
# KEYS: switches, then the shards of the accepted stream
# ARGV: `on` (the deliverer reads) or `off` (the saver reads), group that saves, group that delivers, two_phase: `on`,
#       `off`, or empty if no operator has set it
# Returns 1 if another group reads the stream now
SWITCH: Final = f"""
    {_FUNCTIONS}
    if (redis.call('HGET', KEYS[1], 'two_phase') or '') ~= ARGV[4] then
        redis.call('HDEL', KEYS[1], 'two_phase')
        if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'two_phase', ARGV[4]) end
    end
    if (redis.call('HGET', KEYS[1], 'delivering') or 'off') == ARGV[1] then return 0 end
    redis.call('HDEL', KEYS[1], 'nothing')  -- a write that needs no memory
    local from, to = ARGV[2], ARGV[3]
    if ARGV[1] == 'off' then from, to = to, from end
    for place = 2, #KEYS do
        local found = position(KEYS[place], from)
        local start = found and found.delivered or '0-0'
        if redis.pcall('XGROUP', 'CREATE', KEYS[place], to, start, 'MKSTREAM').err then
            redis.call('XGROUP', 'SETID', KEYS[place], to, start)
        end
    end
    redis.call('HSET', KEYS[1], 'delivering', ARGV[1])
    return 1
"""

# Which group may read new entries of the accepted stream, and when (`streams/fenced_read.py`). An open gate stays open
# until the switches change: nobody else reads new entries of the accepted stream, and nothing moves into the stream to
# save.
# KEYS[1]: accepted stream; KEYS[3]: switches; KEYS[4]: stream to save. ARGV: group that saves, group that delivers
GATE_SAVE_ACCEPTED: Final = f"""
    {_FUNCTIONS}
    local is_open = (redis.call('HGET', KEYS[3], 'delivering') or 'off') ~= 'on'
        and is_idle(KEYS[1], ARGV[2]) and is_drained(KEYS[4], ARGV[1])
"""
GATE_DELIVER: Final = f"""
    {_FUNCTIONS}
    local is_open = redis.call('HGET', KEYS[3], 'delivering') == 'on' and is_idle(KEYS[1], ARGV[1])
"""

# left over: find shards that have entries although RECEIPT_SHARDS does not name them any more.
# ARGV: RECEIPT_SHARDS, the largest number of shards, then the names of the streams
# Returns for each shard found: the place of its stream in the list, from 1, and its number; -1 for the only one
LEFT_OVER: Final = """
    local shards = tonumber(ARGV[1])
    local found = {}
    local function look(key, place, number)
        local length = redis.pcall('XLEN', key)
        if type(length) == 'number' and length > 0 then
            found[#found + 1] = place
            found[#found + 1] = number
        end
    end
    for place = 3, #ARGV do
        if shards > 1 then look(ARGV[place], place - 2, -1) end
        for number = (shards > 1 and shards or 0), tonumber(ARGV[2]) - 1 do
            look(ARGV[place] .. ':' .. number, place - 2, number)
        end
    end
    return found
"""
