-- Restore, one step: leased and trained groups are ready again, for the same step, with their admission decision.
-- Open groups of a step whose version is undone are held until that version is there again.
-- ARGV: epoch, step, completed steps of the restored trainer.
-- Reply: ok, groups of the step that wait to be trained again | no_run | fenced, epoch | retired, durable steps
if not CFG.infra then return { 'no_run' } end
local durable = tonumber(call('HGET', PREFIX .. 'n:train', 'durable') or '0')
if tonumber(ARGV[3]) < durable then return { 'retired', durable } end
local refusal = refuse_epoch(tonumber(ARGV[1]))
if refusal then return refusal end
local groups = 0
local undone = CFG.max_age and tonumber(ARGV[2]) - CFG.max_age > tonumber(ARGV[3])
for _, ordinal in ipairs(call('ZRANGE', PREFIX .. 'step:train:' .. ARGV[2], 0, -1)) do
  local group = load('train', ordinal)
  if group.state == 'leased' or group.state == 'trained' then
    local from = group.state
    move(group, 'ready')
    call('HSET', group.key, 'rs', '1')
    call('HDEL', group.key, 'ts')
    emit('restore', 'train', ordinal, usable(group), ARGV[2], from, ARGV[1])
  end
  -- A straggler that has changed places is not named by its new step: it goes on, and is dropped when it is too old.
  if group.state == 'open' and undone and call('HGET', group.key, 'sw') ~= '1' then hold(group) end
  if group.state == 'ready' and call('HGET', group.key, 'rs') == '1' then groups = groups + 1 end
end
commit()
return { 'ok', groups }
